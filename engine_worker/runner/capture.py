"""CUDA graphs: work is captured once, then all its kernels are replayed in one launch."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from engine_worker.attention.backend import first_line

WARM_UPS = 2
"""Runs before a capture, in which libraries allocate their workspaces and compile their kernels."""

Work = Callable[[], None]


class Graph(Protocol):
    def replay(self) -> None:
        """Queue the captured work on the current stream."""


class CaptureError(RuntimeError):
    """The work runs, but cannot be captured."""


Capture = Callable[[Work], Graph]
"""Runs the work a few times, then captures it. Raises CaptureError. All graphs share one memory pool for intermediate
results."""


class CudaCapture:
    """Captures `torch.cuda.CUDAGraph`s, with one memory pool and one stream for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> torch.cuda.CUDAGraph:
        # Warm-up runs use the capture's stream, since cuBLAS keeps a workspace per stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        graph = self._capture(work)
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        failed: RuntimeError | None = None
        try:
            # thread_local: calls of other threads, such as NCCL's watchdog, must not invalidate the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    work()
                except RuntimeError as error:
                    # Ending an invalidated capture also raises, with a less useful message.
                    failed = error
        except RuntimeError as error:
            failed = failed or error
        if failed is None:
            return graph
        # A failed capture leaves its stream current. In older versions of torch it also leaves the allocator in capture
        # mode, in which memory is never freed (https://github.com/pytorch/pytorch/pull/180395).
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        if isinstance(failed, torch.OutOfMemoryError):
            raise failed
        raise CaptureError(first_line(failed)) from failed

"""Steps as CUDA graphs: all kernels of a model in one launch.

A graph is captured for a number of tokens and also serves fewer tokens, with padding. A replay repeats the captured
launches on the same memory, so inputs and outputs are in static buffers, and nothing in between may read a device value
on the host.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, first_line
from engine_worker.runner.batch import StepArrays, StepTensors
from engine_worker.runner.buffers import Buffers

WARM_UPS = 2
"""Runs before a capture, in which libraries allocate their workspaces and compile their kernels."""
Compute = Callable[[Tensor, Tensor, AttentionInputs], Tensor]
"""(token ids [T] int64, positions [T] int64, attention inputs) -> hidden states [T, hidden]."""
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
        graph, previous_stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
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
        torch.cuda.set_stream(previous_stream)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        if isinstance(failed, torch.OutOfMemoryError):
            raise failed
        raise CaptureError(first_line(failed)) from failed


class Graphs:
    """A graph per size. The largest is captured first, so that smaller ones fit into the memory that it allocated."""

    def __init__(
        self,
        compute: Compute,
        prepare: Callable[[AttentionInputs], AttentionInputs],
        buffers: Buffers,
        capture: Capture,
    ) -> None:
        """`prepare`: `prepare` of the attention backend."""
        self._buffers = buffers
        self.kind, self.sizes = buffers.kind, buffers.sizes
        self._graphs: dict[int, Graph] = {}
        # A graph reads the inputs that the backend prepared for it, but does not keep them alive.
        self._inputs: list[AttentionInputs] = []
        token_ids, positions, attention = buffers.inputs(self.sizes[-1])
        # One output buffer for all sizes, shaped by an eager run of the largest.
        self._hidden = torch.empty_like(compute(token_ids, positions, prepare(attention)))
        for size in reversed(self.sizes):
            self._graphs[size] = capture(self._work(size, compute, prepare))

    def _work(self, size: int, compute: Compute, prepare: Callable[[AttentionInputs], AttentionInputs]) -> Work:
        token_ids, positions, attention = self._buffers.inputs(size)
        inputs, hidden = prepare(attention), self._hidden[:size]
        self._inputs.append(inputs)

        def work() -> None:
            hidden.copy_(compute(token_ids, positions, inputs))

        return work

    def fit(self, arrays: StepArrays) -> int | None:
        """Size of the smallest graph that can compute this step; None if there is no such graph."""
        count = len(arrays.token_ids)
        if count > self.sizes[-1] or not self._buffers.holds(arrays):
            return None
        return self.sizes[bisect_left(self.sizes, count)]

    def pad(self, arrays: StepArrays, size: int) -> StepArrays:
        return self._buffers.pad(arrays, size)

    def __call__(self, step: StepTensors) -> Tensor:
        """Compute a step that is padded to one of `sizes`. Returns hidden states [T, hidden], in memory that the next
        call overwrites."""
        self._buffers.fill(step)
        self._graphs[len(step.token_ids)].replay()
        return self._hidden[: len(step.token_ids)]

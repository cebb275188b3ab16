"""Generation steps as CUDA graphs: the kernels of a whole model, launched as one.

A graph is captured for a number of sequences and serves any fewer, with padding. It repeats what was launched while it
was captured, on the same memory: so inputs and outputs lie in buffers that stay (`buffers`), and nothing between them
may look at a number on the device.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.attention.inputs import AttentionInputs
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.buffers import Buffers
from engine_worker.runner.tensors import Tensors
from engine_worker.runner.weights import Progress

LARGEST = 512
"""Sequences in a graph at most: larger steps keep a GPU busy while their kernels are launched one by one."""
WARM_UPS = 2
"""Runs before a capture, in which libraries allocate what they keep and compile what they need."""

Work = Callable[[], None]
Compute = Callable[[Tensor, Tensor, AttentionInputs], Tensor]
"""Token ids and positions [T] int64 and what attention needs -> hidden states [T, hidden]."""


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Do it again, in the current stream."""
        ...


class CaptureError(RuntimeError):
    """The work runs, but cannot be captured."""


class Capture(Protocol):
    """Makes graphs; all of them share the memory of what lies between their inputs and outputs."""

    def __call__(self, work: Work) -> Graph:
        """Run the work some times, then capture it. Raises CaptureError."""
        ...


class CudaCapture:
    """`torch.cuda.CUDAGraph` with one memory pool and one stream for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> torch.cuda.CUDAGraph:
        """See `Capture`. The runs come first in the stream of the capture: what cuBLAS keeps is kept per stream. What
        other threads ask of the device meanwhile, as NCCL's do, is no part of it."""
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
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    work()
                except RuntimeError as error:
                    # The end of a spoilt capture raises too, and says less.
                    failed = error
        except RuntimeError as error:
            failed = failed or error
        if failed is None:
            return graph
        # It also leaves its stream as the current one and, until torch mended that, the allocator in the capture, where
        # it frees nothing any more (https://github.com/pytorch/pytorch/pull/180395).
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        if isinstance(failed, torch.OutOfMemoryError):
            raise failed
        raise CaptureError(str(failed).partition("\n")[0]) from failed


def graph_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then every 16; the last is the largest batch, or LARGEST."""
    last = min(max_batch_size, LARGEST)
    return [*(size for size in (1, 2, 4, 8, *range(16, last, 16)) if size < last), last]


class Graphs:
    """A graph per size, captured from the largest down, so that the smaller ones find room in what it took."""

    def __init__(
        self,
        compute: Compute,
        prepare: Callable[[AttentionInputs], AttentionInputs],
        buffers: Buffers,
        capture: Capture,
        progress: Progress,
    ) -> None:
        """`prepare`: of the attention backend. `progress` is called with graphs done and graphs in all."""
        self._buffers = buffers
        self._sizes = graph_sizes(buffers.rows)
        self._graphs: dict[int, Graph] = {}
        self._inputs: list[AttentionInputs] = []
        """What the backend made for each: a graph reads it, but does not keep it."""
        token_ids, positions, attention = buffers.inputs(buffers.rows)
        self._hidden = torch.empty_like(compute(token_ids, positions, prepare(attention)))
        for done, size in enumerate(reversed(self._sizes)):
            progress(done, len(self._sizes))
            self._graphs[size] = capture(self._work(size, compute, prepare))
        progress(len(self._sizes), len(self._sizes))

    def _work(self, size: int, compute: Compute, prepare: Callable[[AttentionInputs], AttentionInputs]) -> Work:
        token_ids, positions, attention = self._buffers.inputs(size)
        inputs, hidden = prepare(attention), self._hidden[:size]
        self._inputs.append(inputs)

        def work() -> None:
            hidden.copy_(compute(token_ids, positions, inputs))

        return work

    def fit(self, arrays: Arrays) -> int | None:
        """Size of the graph for this step: of one token per sequence, with room for all."""
        rows, blocks = arrays.block_tables.shape
        if arrays.max_query != 1 or rows > self._buffers.rows or blocks > self._buffers.blocks:
            return None
        return self._sizes[bisect_left(self._sizes, rows)]

    def __call__(self, step: Tensors) -> Tensor:
        """Hidden states [T, hidden] of a step padded to a size, in memory that the next one overwrites."""
        self._buffers.fill(step)
        self._graphs[len(step.token_ids)].replay()
        return self._hidden[: len(step.token_ids)]

    @property
    def sizes(self) -> list[int]:
        """Rising."""
        return self._sizes

"""Generation steps as CUDA graphs: all kernels of a model in one launch.

A graph is captured for a number of sequences and also serves fewer, with padding. A replay repeats the captured
launches on the same memory: inputs and outputs therefore live in static buffers, and nothing in between may read a
device value on the host.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, first_line
from engine_worker.runner.batch import StepArrays, StepTensors
from engine_worker.runner.weights import Progress

LARGEST = 512
"""Sequences in a graph at most: larger steps keep a GPU busy even if their kernels are launched one by one."""
WARM_UPS = 2
"""Runs before a capture, in which libraries allocate their workspaces and compile what they need."""

Work = Callable[[], None]
Compute = Callable[[Tensor, Tensor, AttentionInputs], Tensor]
"""(token ids [T] int64, positions [T] int64, attention inputs) -> hidden states [T, hidden]."""


class Graph(Protocol):
    def replay(self) -> None:
        """Queue it again, on the current stream."""


class CaptureError(RuntimeError):
    """The work runs, but cannot be captured."""


Capture = Callable[[Work], Graph]
"""Runs the work a few times, then captures it. Raises CaptureError. All graphs share one memory pool for intermediate
results."""


class CudaCapture:
    """`torch.cuda.CUDAGraph` with one memory pool and one stream for all graphs."""

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
                    # Ending an invalidated capture raises too, with a less useful message.
                    failed = error
        except RuntimeError as error:
            failed = failed or error
        if failed is None:
            return graph
        # A failed capture leaves its stream current. In older versions of torch it also leaves the allocator in capture
        # mode, where it frees nothing any more (https://github.com/pytorch/pytorch/pull/180395).
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        if isinstance(failed, torch.OutOfMemoryError):
            raise failed
        raise CaptureError(first_line(failed)) from failed


def pad(arrays: StepArrays, size: int) -> StepArrays:
    """A generation step of B sequences padded to `size`: token 0 at position 0 of sequences without context, stored
    nowhere."""
    count = size - len(arrays.token_ids)
    if not count:
        return arrays
    zeros = np.zeros(count, np.int64)
    tables = np.zeros((size, arrays.block_tables.shape[1]), np.int32)
    tables[:-count] = arrays.block_tables
    return replace(
        arrays,
        token_ids=np.concatenate((arrays.token_ids, zeros)),
        positions=np.concatenate((arrays.positions, zeros)),
        slots=np.concatenate((arrays.slots, zeros - 1)),
        block_tables=tables,
        query_start=np.arange(size + 1, dtype=np.int32),
        context_lengths=np.concatenate((arrays.context_lengths, zeros.astype(np.int32))),
        generation_rows=size,
    )


def table_width(max_context: int, window: int | None, tokens_per_block: int) -> int:
    """Blocks in the longest table of a generation step."""
    # A table begins with the block where the window begins, at any offset in it.
    longest = max_context if window is None else min(max_context, window + tokens_per_block - 1)
    return -(-longest // tokens_per_block)


class Buffers:
    """Static inputs for generation steps of at most `rows` sequences with `blocks` blocks each; initially all padding.

    Graphs of all sizes share them: each reads the leading rows.
    """

    def __init__(self, rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        self.rows = rows
        self.blocks = blocks
        self._max_context = blocks * tokens_per_block
        self._token_ids, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._context_lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def inputs(self, size: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        """Token ids, positions and attention inputs of the leading `size` rows."""
        attention = AttentionInputs(
            self._slots[:size],
            self._block_tables[:size],
            self._query_start[: size + 1],
            self._context_lengths[:size],
            generation_rows=size,
            max_query=1,
            # A graph keeps the values of its capture, so it must be captured for the longest context possible.
            max_context=self._max_context,
        )
        return self._token_ids[:size], self._positions[:size], attention

    def fill(self, step: StepTensors) -> None:
        """Copy in a padded generation step."""
        size, attention = len(step.token_ids), step.attention
        token_ids, positions, inputs = self.inputs(size)
        torch._foreach_copy_([token_ids, positions, inputs.slots], [step.token_ids, step.positions, attention.slots])
        inputs.context_lengths.copy_(attention.context_lengths)
        # Old blocks may remain behind the new ones in a table: no context reaches them.
        inputs.block_tables[:, : attention.block_tables.shape[1]].copy_(attention.block_tables)


def graph_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then every 16; the last is the largest batch, or LARGEST."""
    last = min(max_batch_size, LARGEST)
    return [*(size for size in (1, 2, 4, 8, *range(16, last, 16)) if size < last), last]


class Graphs:
    """A graph per batch size, captured largest first, so that smaller ones fit into the memory it allocated."""

    def __init__(
        self,
        compute: Compute,
        prepare: Callable[[AttentionInputs], AttentionInputs],
        buffers: Buffers,
        capture: Capture,
        progress: Progress,
    ) -> None:
        """`prepare`: the attention backend's. `progress` gets graphs done and graphs in total."""
        self._buffers = buffers
        self.sizes = graph_sizes(buffers.rows)
        self._graphs: dict[int, Graph] = {}
        # A graph reads the inputs that the backend prepared for it, but does not keep them alive.
        self._inputs: list[AttentionInputs] = []
        token_ids, positions, attention = buffers.inputs(buffers.rows)
        # One output buffer for all sizes, shaped by an eager run of the largest.
        self._hidden = torch.empty_like(compute(token_ids, positions, prepare(attention)))
        for done, size in enumerate(reversed(self.sizes)):
            progress(done, len(self.sizes))
            self._graphs[size] = capture(self._work(size, compute, prepare))
        progress(len(self.sizes), len(self.sizes))

    def _work(self, size: int, compute: Compute, prepare: Callable[[AttentionInputs], AttentionInputs]) -> Work:
        token_ids, positions, attention = self._buffers.inputs(size)
        inputs, hidden = prepare(attention), self._hidden[:size]
        self._inputs.append(inputs)

        def work() -> None:
            hidden.copy_(compute(token_ids, positions, inputs))

        return work

    def fit(self, arrays: StepArrays) -> int | None:
        """Size of the smallest graph that holds this step; None if none does, or a sequence has several tokens."""
        rows, blocks = arrays.block_tables.shape
        # A graph repeats the launches of its capture, which had no adapters.
        if (
            arrays.adapters is not None
            or arrays.max_query != 1
            or rows > self._buffers.rows
            or blocks > self._buffers.blocks
        ):
            return None
        # A prompt may end with a virtual token, whose row has no place in the buffers; nor have three positions.
        if arrays.virtual_tokens is not None or arrays.positions.ndim > 1:
            return None
        return self.sizes[bisect_left(self.sizes, rows)]

    def __call__(self, step: StepTensors) -> Tensor:
        """Hidden states [T, hidden] of a step padded to one of `sizes`, in memory that the next call overwrites."""
        self._buffers.fill(step)
        self._graphs[len(step.token_ids)].replay()
        return self._hidden[: len(step.token_ids)]

"""Static inputs of captured steps. Graphs of all sizes share them; each graph reads the leading rows."""

from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs
from engine_worker.attention.split import CAPTURED_ROWS
from engine_worker.runner.batch import StepArrays, StepTensors

Number = TypeVar("Number", np.int32, np.int64)

LARGEST = 512
"""Maximum number of sequences in a graph for generation steps, and of tokens in a graph for steps with context. Larger
steps keep a GPU busy even if their kernels are launched one by one."""
SMALLEST_CONTEXT = 8
"""Tokens in the smallest graph of steps with context."""


class Buffers(Protocol):
    kind: str
    """Kind of steps, for the log."""
    sizes: list[int]
    """Numbers of tokens for which there are graphs, ascending."""

    def holds(self, arrays: StepArrays) -> bool:
        """Whether the step, padded to one of `sizes`, fits these inputs."""

    def pad(self, arrays: StepArrays, size: int) -> StepArrays:
        """Pad a step to `size` tokens."""

    def inputs(self, size: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        """Token ids, positions and attention inputs of the leading `size` tokens; all padding at first."""

    def fill(self, step: StepTensors) -> None:
        """Copy in a padded step."""


class _StaticInputs:
    """Inputs of at most `tokens` tokens and `rows` sequences with `blocks` blocks each."""

    def __init__(self, tokens: int, rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        self.rows = rows
        self.blocks = blocks
        # A graph keeps the values of its capture, so it must be captured for the longest context possible.
        self.max_context = blocks * tokens_per_block
        self.token_ids, self.positions = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.context_lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def holds(self, arrays: StepArrays) -> bool:
        rows, blocks = arrays.block_tables.shape
        # A graph repeats the launches of its capture, which had no adapters. There are no buffers for virtual tokens or
        # for three positions per token.
        return (
            rows <= self.rows
            and blocks <= self.blocks
            and arrays.adapters is None
            and arrays.virtual_tokens is None
            and arrays.positions.ndim == 1
        )

    def fill(self, step: StepTensors) -> None:
        size, attention = len(step.token_ids), step.attention
        torch._foreach_copy_(
            [self.token_ids[:size], self.positions[:size], self.slots[:size]],
            [step.token_ids, step.positions, attention.slots],
        )
        rows, blocks = attention.block_tables.shape
        self.context_lengths[:rows].copy_(attention.context_lengths)
        # Blocks of earlier steps may remain after the new ones in a table: no context length reaches them.
        self.block_tables[:rows, :blocks].copy_(attention.block_tables)


class GenerationBuffers:
    """Inputs of generation steps. They are padded with sequences without context: token 0 at position 0, whose keys and
    values are stored nowhere."""

    def __init__(self, rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        self.kind = ""
        self.sizes = generation_sizes(rows)
        self._static = _StaticInputs(rows, rows, blocks, tokens_per_block, device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def holds(self, arrays: StepArrays) -> bool:
        return arrays.max_query == 1 and self._static.holds(arrays)

    def pad(self, arrays: StepArrays, size: int) -> StepArrays:
        padded = _padded(arrays, size, size)
        return replace(padded, query_start=np.arange(size + 1, dtype=np.int32), generation_rows=size)

    def inputs(self, size: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        static = self._static
        attention = AttentionInputs(
            static.slots[:size],
            static.block_tables[:size],
            self._query_start[: size + 1],
            static.context_lengths[:size],
            generation_rows=size,
            max_query=1,
            max_context=static.max_context,
        )
        return static.token_ids[:size], static.positions[:size], attention

    def fill(self, step: StepTensors) -> None:
        self._static.fill(step)


class ContextBuffers:
    """Inputs of small steps with context or draft tokens. They are padded with tokens that belong to no sequence, and
    with sequences without tokens."""

    def __init__(self, tokens: int, rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        self.kind = "with context"
        self.sizes = context_sizes(tokens)
        self._max_rows = min(rows, CAPTURED_ROWS)
        self._static = _StaticInputs(self.sizes[-1], self._max_rows, blocks, tokens_per_block, device)
        self._query_start = torch.zeros(self._max_rows + 1, dtype=torch.int32, device=device)

    def holds(self, arrays: StepArrays) -> bool:
        return len(arrays.token_ids) <= self.sizes[-1] and self._static.holds(arrays)

    def pad(self, arrays: StepArrays, size: int) -> StepArrays:
        rows = self._rows(size)
        missing = rows - len(arrays.context_lengths)
        return replace(
            _padded(arrays, size, rows),
            query_start=np.pad(arrays.query_start, (0, missing), mode="edge"),
        )

    def inputs(self, size: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        static, rows = self._static, self._rows(size)
        attention = AttentionInputs(
            static.slots[:size],
            static.block_tables[:rows],
            self._query_start[: rows + 1],
            static.context_lengths[:rows],
            generation_rows=0,
            max_query=size,
            max_context=static.max_context,
            captured_context=True,
        )
        return static.token_ids[:size], static.positions[:size], attention

    def fill(self, step: StepTensors) -> None:
        self._static.fill(step)
        self._query_start[: len(step.attention.query_start)].copy_(step.attention.query_start)

    def _rows(self, size: int) -> int:
        """Sequences in a graph of `size` tokens; each sequence of a step has at least one token."""
        return min(size, self._max_rows)


def _padded(arrays: StepArrays, tokens: int, rows: int) -> StepArrays:
    """Pad all arrays but `query_start` to `tokens` tokens and `rows` sequences."""
    more = tokens - len(arrays.token_ids)
    return replace(
        arrays,
        token_ids=_extended(arrays.token_ids, more, 0),
        positions=_extended(arrays.positions, more, 0),
        slots=_extended(arrays.slots, more, -1),
        block_tables=_extended(arrays.block_tables, rows - len(arrays.block_tables), 0),
        context_lengths=_extended(arrays.context_lengths, rows - len(arrays.context_lengths), 0),
    )


def _extended(array: NDArray[Number], more: int, value: int) -> NDArray[Number]:
    """Append `more` rows of this value."""
    if not more:
        return array
    filling = np.full((more, *array.shape[1:]), value, array.dtype)
    return np.concatenate((array, filling))


def table_width(max_context: int, window: int | None, tokens_per_block: int) -> int:
    """Blocks in the longest table of a generation step."""
    # A table starts with the block that contains the start of the window, at any offset.
    longest = max_context if window is None else min(max_context, window + tokens_per_block - 1)
    return -(-longest // tokens_per_block)


def generation_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 16; the last size is the largest batch, or LARGEST."""
    last = min(max_batch_size, LARGEST)
    return [*(size for size in (1, 2, 4, 8, *range(16, last, 16)) if size < last), last]


def context_sizes(max_tokens: int) -> list[int]:
    """Powers of two from SMALLEST_CONTEXT; the last size is the largest step, or LARGEST."""
    last = min(max_tokens, LARGEST)
    powers = (1 << power for power in range(SMALLEST_CONTEXT.bit_length() - 1, last.bit_length()))
    return [*(size for size in powers if size < last), last]

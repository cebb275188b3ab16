"""Static inputs of captured steps. Graphs of all sizes share them; each graph reads the leading rows."""

from dataclasses import replace
from typing import TypeVar

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


class Buffers:
    """Inputs of at most `sizes[-1]` tokens and `rows` sequences with `blocks` blocks each; all padding at first."""

    kind: str
    """Kind of steps, for the log."""
    has_context: bool
    """Whether a sequence may have several tokens in a step."""

    def __init__(self, sizes: list[int], rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        self.sizes = sizes
        """Numbers of tokens for which there are graphs, ascending."""
        self._max_rows = rows
        self._blocks = blocks
        # A graph keeps the values of its capture, so it must be captured for the longest context possible.
        self._max_context = blocks * tokens_per_block
        self._token_ids, self._positions = torch.zeros(2, sizes[-1], dtype=torch.int64, device=device)
        self._slots = torch.full((sizes[-1],), -1, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._context_lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def holds(self, arrays: StepArrays) -> bool:
        """Whether the step, padded to one of `sizes`, fits these inputs."""
        rows, blocks = arrays.block_tables.shape
        # A graph repeats the launches of its capture, which had no adapters. There are no buffers for virtual tokens or
        # for three positions per token.
        return (
            rows <= self._max_rows
            and blocks <= self._blocks
            and arrays.adapters is None
            and arrays.virtual_tokens is None
            and arrays.positions.ndim == 1
        )

    def pad(self, arrays: StepArrays, size: int) -> StepArrays:
        """Pad a step to `size` tokens and the sequences of a graph of this size."""
        more, missing = size - len(arrays.token_ids), self._rows(size) - len(arrays.context_lengths)
        if self.has_context:
            generation_rows = arrays.generation_rows
            query_start = np.pad(arrays.query_start, (0, missing), mode="edge")
        else:
            generation_rows = size
            query_start = np.arange(size + 1, dtype=np.int32)
        return replace(
            arrays,
            token_ids=_extended(arrays.token_ids, more, 0),
            positions=_extended(arrays.positions, more, 0),
            slots=_extended(arrays.slots, more, -1),
            block_tables=_extended(arrays.block_tables, missing, 0),
            query_start=query_start,
            context_lengths=_extended(arrays.context_lengths, missing, 0),
            generation_rows=generation_rows,
        )

    def inputs(self, size: int) -> tuple[Tensor, Tensor, AttentionInputs]:
        """Token ids, positions and attention inputs of the leading `size` tokens."""
        rows = self._rows(size)
        attention = AttentionInputs(
            self._slots[:size],
            self._block_tables[:rows],
            self._query_start[: rows + 1],
            self._context_lengths[:rows],
            generation_rows=0 if self.has_context else size,
            max_query=size if self.has_context else 1,
            max_context=self._max_context,
            captured_context=self.has_context,
        )
        return self._token_ids[:size], self._positions[:size], attention

    def fill(self, step: StepTensors) -> None:
        """Copy in a padded step."""
        size, attention = len(step.token_ids), step.attention
        torch._foreach_copy_(
            [self._token_ids[:size], self._positions[:size], self._slots[:size]],
            [step.token_ids, step.positions, attention.slots],
        )
        rows, blocks = attention.block_tables.shape
        self._context_lengths[:rows].copy_(attention.context_lengths)
        # Blocks of earlier steps may remain after the new ones in a table: no context length reaches them.
        self._block_tables[:rows, :blocks].copy_(attention.block_tables)

    def _rows(self, size: int) -> int:
        """Sequences in a graph of `size` tokens; each sequence of a step has at least one token."""
        return min(size, self._max_rows)


class GenerationBuffers(Buffers):
    """Inputs of generation steps. They are padded with sequences without context: token 0 at position 0, whose keys and
    values are stored nowhere."""

    kind, has_context = "", False

    def __init__(self, rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        super().__init__(generation_sizes(rows), rows, blocks, tokens_per_block, device)
        torch.arange(rows + 1, out=self._query_start)

    def holds(self, arrays: StepArrays) -> bool:
        return arrays.max_query == 1 and super().holds(arrays)


class ContextBuffers(Buffers):
    """Inputs of small steps with context or draft tokens. They are padded with tokens that belong to no sequence, and
    with sequences without tokens."""

    kind, has_context = "with context", True

    def __init__(self, tokens: int, rows: int, blocks: int, tokens_per_block: int, device: torch.device) -> None:
        super().__init__(context_sizes(tokens), min(rows, CAPTURED_ROWS), blocks, tokens_per_block, device)

    def fill(self, step: StepTensors) -> None:
        super().fill(step)
        self._query_start[: len(step.attention.query_start)].copy_(step.attention.query_start)


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

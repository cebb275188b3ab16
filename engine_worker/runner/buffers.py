"""The memory that CUDA graphs read from and write to: named once, filled anew for each step."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine_worker.attention.inputs import AttentionInputs
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.tensors import Tensors


def pad(arrays: Arrays, size: int) -> Arrays:
    """A generation step of B sequences as one of `size`: padding is token 0 at position 0 of a sequence without
    context, and is written nowhere."""
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
    """Blocks in the longest table of a generation step. A table begins with the block where the window does, at any
    place in it."""
    longest = max_context if window is None else min(max_context, window + tokens_per_block - 1)
    return -(-longest // tokens_per_block)


class Buffers:
    """Inputs of generation steps of at most N sequences with M blocks each; to begin with padding only. Graphs of all
    sizes share them: each takes what lies in front."""

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
        """Token ids, positions and what attention needs, of `size` rows. The longest context is the longest there can
        be, for a graph is captured once."""
        attention = AttentionInputs(
            self._slots[:size],
            self._block_tables[:size],
            self._query_start[: size + 1],
            self._context_lengths[:size],
            generation_rows=size,
            max_query=1,
            max_context=self._max_context,
        )
        return self._token_ids[:size], self._positions[:size], attention

    def fill(self, step: Tensors) -> None:
        """With a padded generation step. In a table the blocks of former steps stay behind the new ones: no context
        reaches them."""
        size, attention = len(step.token_ids), step.attention
        token_ids, positions, inputs = self.inputs(size)
        torch._foreach_copy_([token_ids, positions, inputs.slots], [step.token_ids, step.positions, attention.slots])
        inputs.context_lengths.copy_(attention.context_lengths)
        inputs.block_tables[:, : attention.block_tables.shape[1]].copy_(attention.block_tables)

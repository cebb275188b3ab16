"""A step's arrays on a device."""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.inputs import AttentionInputs
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.transfer import to_device


@dataclass(frozen=True, slots=True)
class Tensors:
    """`Arrays`, field by field."""

    token_ids: Tensor
    """[T] int64. What follows a draw is there after `follow`."""
    positions: Tensor
    """[T] int64."""
    attention: AttentionInputs
    last_tokens: Tensor | None
    """[R] int64; None when they are all T."""
    follow_tokens: Tensor
    follow_draws: Tensor
    """Each [F] int64."""

    @classmethod
    def of(cls, arrays: Arrays, device: torch.device) -> "Tensors":
        """On a CPU they share the arrays' memory; nothing waits for the copy to another device."""
        parts: list[NDArray[Any]] = [
            arrays.token_ids,
            arrays.positions,
            arrays.slots,
            arrays.block_tables,
            arrays.query_start,
            arrays.context_lengths,
            arrays.follow_tokens,
            arrays.follow_draws,
        ]
        rows = [] if arrays.last_tokens is None else [arrays.last_tokens]
        token_ids, positions, slots, tables, query_start, lengths, tokens, draws, *last = to_device(
            parts + rows, device
        )
        attention = AttentionInputs(
            slots, tables, query_start, lengths, arrays.generation_rows, arrays.max_query, arrays.max_context
        )
        return cls(token_ids, positions, attention, last[0] if last else None, tokens, draws)

    def follow(self, sampled: Tensor) -> None:
        """Fill in what the draws of the step before gave, [D] int64."""
        if len(self.follow_tokens):
            self.token_ids.index_copy_(0, self.follow_tokens, sampled.index_select(0, self.follow_draws))

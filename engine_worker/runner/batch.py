"""A step as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.inputs import AttentionInputs
from engine_worker.step import Draw, Slice


class Follows(NamedTuple):
    """Which tokens the step before gives, and who else needs them."""

    tokens: Tensor
    """[F] int64: in `token_ids`."""
    sampled: Tensor
    """[F] int64: the draws of the step before, in its order."""
    histories: list[tuple[int, int]]
    """(draw, draw of the step before) where a penalty has to see the token."""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B slices, and what to sample after which."""

    token_ids: Tensor
    """[T] int64. What follows a draw is there after `follow`."""
    positions: Tensor
    """[T] int64."""
    attention: AttentionInputs
    last_tokens: Tensor | None
    """[R] int64: the tokens whose logits are needed; None when they are all T."""
    draws: list[Draw]
    draw_rows: list[int]
    """Row of the logits, 0 to R - 1, of each draw."""
    follows: Follows | None

    def follow(self, sampled: Tensor) -> None:
        """Fill in what the draws of the step before gave, [D] int64."""
        if self.follows is None:
            return
        self.token_ids.index_copy_(0, self.follows.tokens, sampled.index_select(0, self.follows.sampled))
        if self.follows.histories:
            tokens = sampled.tolist()
            for i, before in self.follows.histories:
                self.draws[i] = replace(self.draws[i], output=[*self.draws[i].output, tokens[before]])


def build(slices: Sequence[Slice], tokens_per_block: int, window: int | None, device: torch.device) -> Batch:
    """Slices of at least one token each. Their block tables begin for attention where `window`, the widest of all
    layers, of their first token does: what lies behind costs nothing."""
    size = len(slices)
    counts = np.fromiter((len(part.tokens) for part in slices), np.int64, size)
    starts = np.fromiter((part.start for part in slices), np.int64, size)
    skipped = np.zeros(size, np.int64) if window is None else np.maximum(starts - window + 1, 0) // tokens_per_block
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_ids = np.fromiter(chain.from_iterable(part.tokens for part in slices), np.int64, total)
    positions = starts if total == size else np.arange(total) + np.repeat(starts - ends + counts, counts)
    rows = np.arange(size) if total == size else np.repeat(np.arange(size), counts)
    lengths = starts + counts - skipped * tokens_per_block
    block_tables = _padded([part.block_table for part in slices], skipped, -(-lengths // tokens_per_block))
    slots = block_tables[rows, positions // tokens_per_block - skipped[rows]].astype(np.int64)
    slots = slots * tokens_per_block + positions % tokens_per_block

    draws = [_kept(draw) for part in slices for draw in part.draws]
    drawing = [i for i, part in enumerate(slices) if part.draws]
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        attention=AttentionInputs(
            slots=_tensor(slots, device),
            block_tables=_tensor(block_tables, device),
            query_start=_tensor(np.concatenate(([0], ends)).astype(np.int32), device),
            context_lengths=_tensor(lengths.astype(np.int32), device),
            max_query=int(counts.max()),
            max_context=int(lengths.max()),
        ),
        last_tokens=None if len(drawing) == total else _tensor((ends - 1)[drawing], device),
        draws=draws,
        draw_rows=[row for row, i in enumerate(drawing) for _ in slices[i].draws],
        follows=_follows(slices, ends, device),
    )


def _kept(draw: Draw) -> Draw:
    """With the tokens that penalties look at as they are now."""
    return replace(draw, output=tuple(draw.output)) if draw.sampling.penalized else draw


def _follows(slices: Sequence[Slice], ends: NDArray[np.int64], device: torch.device) -> Follows | None:
    following = [(i, part.follows) for i, part in enumerate(slices) if part.follows is not None]
    if not following:
        return None
    drawing = ((draw, part.follows) for part in slices for draw in part.draws)
    histories = [(i, at) for i, (draw, at) in enumerate(drawing) if at is not None and draw.sampling.penalized]
    rows, sampled = (np.array(column, np.int64) for column in zip(*following, strict=True))
    return Follows(_tensor(ends[rows] - 1, device), _tensor(sampled, device), histories)


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(array)
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def _padded(tables: list[Sequence[int]], skipped: NDArray[np.int64], used: NDArray[np.int64]) -> NDArray[np.int32]:
    """Of each table the `used` blocks after the first `skipped`, [B, M]; the rest is zeros."""
    out = np.zeros((len(tables), int(used.max())), np.int32)
    inside = np.arange(out.shape[1]) < used[:, None]
    parts = zip(tables, skipped.tolist(), used.tolist(), strict=True)
    blocks = chain.from_iterable(table[first : first + count] for table, first, count in parts)
    out[inside] = np.fromiter(blocks, np.int32, int(used.sum()))
    return out

"""A step as arrays, and what to sample from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine_worker.runner.arrays import Arrays
from engine_worker.sampling.sampler import Plan
from engine_worker.step import Draw, Slice


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model computes, and the draws from its R rows of logits."""

    arrays: Arrays
    draws: list[Draw]
    draw_rows: list[int]
    """Row of the logits, 0 to R - 1, of each draw."""
    num_rows: int
    """R."""
    follows: dict[int, int]
    """Draws whose output has one more token than is known -> the draw of the step before that gives it."""

    def plan(self, vocab_size: int) -> Plan:
        """How to sample. Whatever draws refer to may change once it is there."""
        return Plan.of(self.draws, self.draw_rows, self.num_rows, vocab_size, self.follows)


def build(slices: Sequence[Slice], tokens_per_block: int, window: int | None) -> Batch:
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

    drawing = [i for i, part in enumerate(slices) if part.draws]
    follow_tokens, follow_draws = _follows(slices, ends)
    arrays = Arrays(
        token_ids,
        positions,
        slots,
        block_tables,
        query_start=np.concatenate(([0], ends)).astype(np.int32),
        context_lengths=lengths.astype(np.int32),
        last_tokens=None if len(drawing) == total else (ends - 1)[drawing],
        follow_tokens=follow_tokens,
        follow_draws=follow_draws,
        generation_rows=int(np.logical_and.accumulate(counts == 1).sum()),
        max_query=int(counts.max()),
        max_context=int(lengths.max()),
    )
    return Batch(
        arrays,
        draws=[draw for part in slices for draw in part.draws],
        draw_rows=[row for row, i in enumerate(drawing) for _ in slices[i].draws],
        num_rows=len(drawing),
        follows=_following_draws(slices) if len(follow_tokens) else {},
    )


def _follows(slices: Sequence[Slice], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    following = [(i, part.follows) for i, part in enumerate(slices) if part.follows is not None]
    if not following:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, draws = (np.array(column, np.int64) for column in zip(*following, strict=True))
    return ends[rows] - 1, draws


def _following_draws(slices: Sequence[Slice]) -> dict[int, int]:
    drawing = (part.follows for part in slices for _ in part.draws)
    return {i: at for i, at in enumerate(drawing) if at is not None}


def _padded(tables: list[Sequence[int]], skipped: NDArray[np.int64], used: NDArray[np.int64]) -> NDArray[np.int32]:
    """Of each table the `used` blocks after the first `skipped`, [B, M]; the rest is zeros."""
    out = np.zeros((len(tables), int(used.max())), np.int32)
    inside = np.arange(out.shape[1]) < used[:, None]
    parts = zip(tables, skipped.tolist(), used.tolist(), strict=True)
    blocks = chain.from_iterable(table[first : first + count] for table, first, count in parts)
    out[inside] = np.fromiter(blocks, np.int32, int(used.sum()))
    return out

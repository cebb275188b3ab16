"""A step's slices as arrays: what every rank computes from, and what rank 0 samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine_worker.sampling.sampler import SamplingPlan
from engine_worker.step import Draw, Slice


@dataclass(frozen=True, slots=True)
class StepArrays:
    """T tokens of B slices; plain data that can be sent to other ranks. Attention's are described in
    `AttentionInputs`."""

    token_ids: NDArray[np.int64]
    """[T]. Arbitrary where the previous step still has to draw the token; see `follow_tokens`."""
    positions: NDArray[np.int64]
    """[T]."""
    slots: NDArray[np.int64]
    """[T]."""
    block_tables: NDArray[np.int32]
    """[B, M]."""
    query_start: NDArray[np.int32]
    """[B + 1]."""
    context_lengths: NDArray[np.int32]
    """[B]."""
    last_tokens: NDArray[np.int64] | None
    """[R]: the tokens whose logits are needed; None: all."""
    follow_tokens: NDArray[np.int64]
    """[F]: indices of the tokens that the previous step draws."""
    follow_draws: NDArray[np.int64]
    """[F]: the draws of the previous step that yield them."""
    generation_rows: int
    max_query: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A step for the model, and the draws from its R rows of logits."""

    arrays: StepArrays
    draws: list[Draw]
    draw_rows: list[int]
    """Each draw's row of the logits."""
    num_rows: int
    """R."""
    follows: dict[int, int]
    """For draws whose last output token is still being drawn: the draw of the previous step."""

    def plan(self, vocab_size: int) -> SamplingPlan:
        """Copies what it needs of the draws, which the engine may change afterwards."""
        return SamplingPlan.of(self.draws, self.draw_rows, self.num_rows, vocab_size, self.follows)


def build_batch(slices: Sequence[Slice], tokens_per_block: int, window: int | None) -> Batch:
    """`window` is the widest of any layer: block tables are cut to begin there, so that what lies behind costs
    nothing."""
    size = len(slices)
    counts = np.fromiter((len(part.tokens) for part in slices), np.int64, size)
    starts = np.fromiter((part.start for part in slices), np.int64, size)
    skipped = np.zeros(size, np.int64) if window is None else np.maximum(starts - window + 1, 0) // tokens_per_block
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_ids = np.fromiter(chain.from_iterable(part.tokens for part in slices), np.int64, total)
    # One token per slice, as in most steps, needs no repeating.
    positions = starts if total == size else np.arange(total) + np.repeat(starts - ends + counts, counts)
    rows = np.arange(size) if total == size else np.repeat(np.arange(size), counts)
    lengths = starts + counts - skipped * tokens_per_block
    block_tables = _padded([part.block_table for part in slices], skipped, -(-lengths // tokens_per_block))
    slots = block_tables[rows, positions // tokens_per_block - skipped[rows]].astype(np.int64)
    slots = slots * tokens_per_block + positions % tokens_per_block

    drawing = [i for i, part in enumerate(slices) if part.draws]
    follow_tokens, follow_draws = _follows(slices, ends)
    arrays = StepArrays(
        token_ids,
        positions,
        slots,
        block_tables,
        query_start=np.concatenate(([0], ends)).astype(np.int32),
        context_lengths=lengths.astype(np.int32),
        # None spares the gather in the common step, where every token draws.
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
    """Each table's `used` blocks after the first `skipped`, padded with zeros to [B, M]."""
    out = np.zeros((len(tables), int(used.max())), np.int32)
    inside = np.arange(out.shape[1]) < used[:, None]
    parts = zip(tables, skipped.tolist(), used.tolist(), strict=True)
    blocks = chain.from_iterable(table[first : first + count] for table, first, count in parts)
    out[inside] = np.fromiter(blocks, np.int32, int(used.sum()))
    return out

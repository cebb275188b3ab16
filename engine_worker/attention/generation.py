"""Attention for generation rows on a CPU: one query token per sequence, a whole batch per operation, with keys and
values read in place.

The cache is a table of vectors, and each query head has a list of rows in it. The scores are a sampled dense-dense
matrix product (SDDMM): query times keys, at the positions of a sparse matrix with a row per query head. The output is
an embedding bag: for each query head, the weighted sum of its rows of the values. Both operations take lists of any
length, so that no keys or values are copied and only the softmax needs padding. A row's result has the same bits in any
batch.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache, LayerCache

_bag = torch.ops.aten._embedding_bag_forward_only.default
# Arguments of the op.
SUM = 0
NO_PADDING = -1


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A step's indexes and buffers, shared by all layers with the same window.

    B sequences, H query heads, E = H * (sum of the sequences' visible keys) pairs of query head and key.

    For the softmax the scores are laid out in rectangles [sequences * H, width], one per distinct width. A sequence's
    width is its number of blocks in the window, rounded up to a power of two, in tokens: one long sequence does not
    widen the others. Every layer overwrites the same E scores; the other elements of the rectangles remain -inf.
    """

    rows: Tensor | None
    """[B] int64: each sequence's token in the step; None: all tokens, in order."""
    pairs: Tensor
    """Sparse CSR [B * H, slots * kv_heads] of E scores."""
    table_rows: Tensor
    """[E] int32: the columns of `pairs`, which are rows of `LayerCache.value_rows`."""
    bag_start: Tensor
    """[B * H] int32: where each row of `pairs` begins."""
    flat_index: Tensor
    """[E] int64: position of each score in `scores`."""
    scores: Tensor
    """All rectangles, flattened and concatenated."""
    rectangles: tuple[Tensor, ...]
    """Views of `scores`."""


def plan_generation(
    rows: NDArray[np.int64] | None,
    block_tables: NDArray[np.int32],
    lengths: NDArray[np.int32],
    heads: HeadShape,
    cache: KVCache,
    window: int | None,
) -> GenerationPlan:
    """block_tables [B, M]; lengths [B], all positive; rows [B] as in `GenerationPlan`."""
    size = cache.tokens_per_block
    block_tables, firsts, ends = _in_window(block_tables, lengths, size, window)
    widths = [size << (-(-end // size) - 1).bit_length() for end in ends.tolist()]
    if min(widths) != max(widths):
        # Sequences of the same width must be adjacent to share a rectangle.
        order = np.argsort(widths, kind="stable")
        rows = order if rows is None else rows[order]
        block_tables, firsts, ends, widths = block_tables[order], firsts[order], ends[order], sorted(widths)
    table_rows, positions, shapes = [], [], []
    begin, area = 0, 0
    for width, group in groupby(widths):
        end = begin + sum(1 for _ in group)
        places, part = np.arange(width), np.s_[begin:end, None, None]
        inside = ((places >= firsts[part]) & (places < ends[part])).repeat(heads.num_heads, axis=1)
        positions.append(np.flatnonzero(inside) + area)
        table_rows.append(_table_rows(block_tables[begin:end], width, heads, size)[inside])
        shapes.append(((end - begin) * heads.num_heads, width))
        begin, area = end, area + inside.size
    starts = np.zeros(len(ends) * heads.num_heads + 1, np.int32)
    np.cumsum((ends - firsts).repeat(heads.num_heads), out=starts[1:])
    columns, row_starts = _joined(table_rows), torch.from_numpy(starts)
    scores = torch.full((area,), -torch.inf, dtype=cache.dtype)
    rectangles = scores.split([count * width for count, width in shapes])
    return GenerationPlan(
        rows=None if rows is None else torch.from_numpy(rows),
        pairs=_sparse(row_starts, columns, cache.num_blocks * size * heads.num_kv_heads, cache.dtype),
        table_rows=columns,
        bag_start=row_starts[:-1],
        flat_index=_joined(positions),
        scores=scores,
        rectangles=tuple(part.view(shape) for part, shape in zip(rectangles, shapes, strict=True)),
    )


def _in_window(
    block_tables: NDArray[np.int32], lengths: NDArray[np.int32], tokens_per_block: int, window: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Tables that begin with the block of the first visible key, and the range [first, end) of visible keys in them."""
    if window is None:
        return block_tables, np.zeros_like(lengths), lengths
    firsts = np.maximum(lengths - window, 0)
    skipped = firsts // tokens_per_block
    last = block_tables.shape[1] - 1
    columns = skipped[:, None] + np.arange(min(last, -(-window // tokens_per_block)) + 1)
    tables = np.take_along_axis(block_tables, np.minimum(columns, last), axis=1)
    return tables, firsts % tokens_per_block, lengths - skipped * tokens_per_block


def _table_rows(
    block_tables: NDArray[np.int32], width: int, heads: HeadShape, tokens_per_block: int
) -> NDArray[np.int32]:
    """Block tables [b, M] -> row numbers in the pool [b, heads, width]; arbitrary past a sequence's blocks."""
    count, blocks = len(block_tables), width // tokens_per_block
    if block_tables.shape[1] < blocks:
        missing = np.zeros((count, blocks - block_tables.shape[1]), np.int32)
        block_tables = np.concatenate((block_tables, missing), axis=1)
    in_block = np.arange(tokens_per_block, dtype=np.int32)
    slots = (block_tables[:, :blocks, None] * np.int32(tokens_per_block) + in_block).reshape(count, 1, width)
    kv_heads = np.arange(heads.num_kv_heads, dtype=np.int32).repeat(heads.group)[:, None]
    return (slots * np.int32(heads.num_kv_heads) + kv_heads).astype(np.int32, copy=False)


def _joined(parts: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def _sparse(row_starts: Tensor, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    values = torch.zeros(len(columns), dtype=dtype)
    return torch.sparse_csr_tensor(
        row_starts, columns, values, size=(len(row_starts) - 1, width), check_invariants=False
    )


def silence_warning() -> None:
    """Trigger and suppress torch's once-per-process warning that CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _sparse(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 1, torch.float32)


def attend_generation(query: Tensor, cache: LayerCache, plan: GenerationPlan, scale: float) -> Tensor:
    """query [B, heads, head_dim] -> output of the same shape."""
    heads = query.reshape(-1, query.shape[2])
    pairs = plan.pairs
    # out=pairs overwrites the plan's values, so that no layer allocates memory.
    scores = torch.sparse.sampled_addmm(pairs, heads, cache.key_columns, beta=0.0, alpha=scale, out=pairs).values()
    plan.scores.index_copy_(0, plan.flat_index, scores)
    weights = _softmax(plan.rectangles).index_select(0, plan.flat_index)
    bags = _bag(cache.value_rows, plan.table_rows, plan.bag_start, False, SUM, False, weights, False, NO_PADDING)
    out: Tensor = bags[0].view(query.shape)
    return out


def _softmax(rectangles: tuple[Tensor, ...]) -> Tensor:
    """Softmax over the rows of each rectangle; the result is flat, like `GenerationPlan.scores`."""
    parts = [torch.softmax(rectangle, dim=1).view(-1) for rectangle in rectangles]
    return parts[0] if len(parts) == 1 else torch.cat(parts)

"""Generation rows on a CPU: one query token per sequence, all sequences at once, keys and values read where they lie.

Paged attention is an embedding bag. The pool of values, seen as a table of vectors, is the embedding; a query head is a
bag; its attention weights are the bag's per-sample weights: the forward op gives the output. The scores (query · key)
are what the same op's backward computes for the gradient of those weights, with the keys as the table and the queries
as the output's gradient. Both ops take ragged lists of rows, so nothing is gathered and no row is padded but in the
softmax, and a row's result does not depend on its neighbours, bit for bit.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import LayerCache

_dot = torch.ops.aten._embedding_bag_per_sample_weights_backward
_bag = torch.ops.aten._embedding_bag_forward_only
SUM = 0
NO_PADDING = -1


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What all layers share. B sequences, H heads, E = H * sum of context lengths (query head, key) pairs.

    The weights stand in rectangles [sequences, H, width] one after the other, one per width: a sequence's width is its
    number of blocks rounded up to a power of two, in tokens, so one long sequence does not widen the others.
    """

    rows: Tensor | None
    """[B] int64: the sequences' tokens in the step; None when they are all of it, in order."""
    key_rows: Tensor
    """[E] int32: rows of the pool as a table [slots * kv_heads, head_dim], per sequence token by token: as they lie in
    memory."""
    key_bags: Tensor
    """[E] int32: the query head of each."""
    key_cells: Tensor
    """[E] int64: where each score goes in the rectangles."""
    value_rows: Tensor
    """[E] int32: the same rows of the table, per query head."""
    value_cells: Tensor
    """[E] int64: the weight of each."""
    bag_start: Tensor
    """[B * H] int32: where each query head begins in value_rows."""
    scores: Tensor
    """All rectangles, flat. Every layer overwrites the same cells; the others stay -inf."""
    rectangles: tuple[tuple[int, int, int], ...]
    """(begin, end, width) in `scores`."""


def plan(
    rows: NDArray[np.int64] | None,
    block_tables: NDArray[np.int32],
    lengths: NDArray[np.int32],
    heads: HeadShape,
    tokens_per_block: int,
    dtype: torch.dtype,
) -> GenerationPlan:
    """block_tables [B, M], lengths [B] all positive; rows [B] as in the plan."""
    blocks = -(-lengths // tokens_per_block)
    widths = tokens_per_block << np.ceil(np.log2(blocks)).astype(np.int64)
    if (widths != widths[0]).any():
        order = np.argsort(widths, kind="stable")
        rows = order if rows is None else rows[order]
        block_tables, lengths, widths = block_tables[order], lengths[order], widths[order]
    parts, rectangles = [], []
    first_row, cell = 0, 0
    for width, count in zip(*(column.tolist() for column in np.unique(widths, return_counts=True)), strict=True):
        part = slice(first_row, first_row + count)
        slots = _slots(block_tables[part], width, tokens_per_block)
        parts.append(_pairs(slots, lengths[part], heads, first_row * heads.num_heads, cell))
        end = cell + count * heads.num_heads * width
        rectangles.append((cell, end, width))
        first_row, cell = first_row + count, end
    bag_lengths = np.repeat(lengths, heads.num_heads)
    columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)]
    key_rows, key_bags, key_cells, value_rows, value_cells = columns
    return GenerationPlan(
        rows=None if rows is None else torch.from_numpy(rows),
        key_rows=key_rows,
        key_bags=key_bags,
        key_cells=key_cells,
        value_rows=value_rows,
        value_cells=value_cells,
        bag_start=torch.from_numpy((np.cumsum(bag_lengths) - bag_lengths).astype(np.int32)),
        scores=torch.full((cell,), -torch.inf, dtype=dtype),
        rectangles=tuple(rectangles),
    )


def _slots(block_tables: NDArray[np.int32], width: int, tokens_per_block: int) -> NDArray[np.int32]:
    """[b, M] blocks -> [b, width] slots; what lies past a sequence's blocks is arbitrary."""
    blocks = block_tables[:, : width // tokens_per_block]
    slots = blocks[:, :, None] * np.int32(tokens_per_block) + np.arange(tokens_per_block, dtype=np.int32)
    slots = slots.reshape(len(blocks), -1)
    return np.pad(slots, ((0, 0), (0, width - slots.shape[1])))


def _pairs(
    slots: NDArray[np.int32], lengths: NDArray[np.int32], heads: HeadShape, first_bag: int, first_cell: int
) -> tuple[NDArray[np.generic], ...]:
    """One rectangle's key_rows, key_bags, key_cells, value_rows, value_cells. slots [b, width], lengths [b]."""
    size, width = slots.shape
    shape = (size, heads.num_heads, width)
    kv_head = (np.arange(heads.num_heads) // heads.group).astype(np.int32)
    table_rows = slots[:, None, :] * np.int32(heads.num_kv_heads) + kv_head[:, None]
    bags = first_bag + np.arange(size * heads.num_heads, dtype=np.int32).reshape(size, heads.num_heads, 1)
    cells = first_cell + np.arange(table_rows.size).reshape(shape)
    inside = np.broadcast_to((np.arange(width) < lengths[:, None])[:, None, :], shape)

    def by_token(column: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.broadcast_to(column, shape).transpose(0, 2, 1)[inside.transpose(0, 2, 1)]

    return by_token(table_rows), by_token(bags), by_token(cells), table_rows[inside], cells[inside]


def attend(query: Tensor, cache: LayerCache, plan: GenerationPlan, scale: float) -> Tensor:
    """Query [B, heads, head_dim] -> the same shape."""
    size, num_heads, head_dim = query.shape
    flat = (query * scale).view(size * num_heads, head_dim)
    scores = _dot(flat, cache.keys.view(-1, head_dim), plan.key_rows, plan.bag_start, plan.key_bags, SUM, NO_PADDING)
    weights = _softmax(plan.scores.index_copy_(0, plan.key_cells, scores), plan.rectangles)
    out: Tensor = _bag(
        cache.values.view(-1, head_dim),
        plan.value_rows,
        plan.bag_start,
        False,
        SUM,
        False,
        weights.index_select(0, plan.value_cells),
        False,
        NO_PADDING,
    )[0]
    return out.view(size, num_heads, head_dim)


def _softmax(scores: Tensor, rectangles: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Over the rows of each rectangle; flat to flat."""
    parts = [torch.softmax(scores[begin:end].view(-1, width), dim=-1).view(-1) for begin, end, width in rectangles]
    return parts[0] if len(parts) == 1 else torch.cat(parts)

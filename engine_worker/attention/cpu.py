"""The CPU backend: all generation rows in one batch, sequences with context one by one. Needs no compiler.

Generation rows read keys and values in place. The cache is a table of vectors, and each query head has a list of rows
in it. The scores are a sampled dense-dense matrix product (SDDMM): query times keys, at the positions of a sparse
matrix with a row per query head. The output is an embedding bag: for each query head, the weighted sum of its rows of
the values. Both operations take lists of any length, so that no keys or values are copied and only the softmax needs
padding. A row's result has the same bits in any batch.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache

TILE = 256
"""Query tokens per call. Keys after a tile's last token, or before the window of its first, are skipped."""
_bag = torch.ops.aten._embedding_bag_forward_only.default
# Arguments of `_bag`.
SUM = 0
NO_PADDING = -1


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """A sequence's part of the step: tokens [begin, end), which are the last of the `length` tokens in `blocks`."""

    begin: int
    end: int
    length: int
    blocks: Tensor | slice
    """[ceil(length / tokens_per_block)] int64; or, if they are contiguous, a slice of the pool, which needs no copy."""
    window: int | None

    @property
    def widest(self) -> int:
        """Upper bound of the keys that one tile needs."""
        return self.length if self.window is None else min(self.length, TILE + self.window - 1)


def plan_context(
    begin: int, end: int, length: int, block_table: Tensor, tokens_per_block: int, window: int | None
) -> ContextPlan:
    """block_table [M] int32; blocks that lie entirely before the window of the first token are omitted."""
    first = 0 if window is None else max(0, length - (end - begin) - window + 1)
    skipped = first // tokens_per_block
    blocks = block_table[skipped : -(-length // tokens_per_block)].long()
    length -= skipped * tokens_per_block
    start = int(blocks[0])
    if torch.equal(blocks, torch.arange(start, start + len(blocks))):
        return ContextPlan(begin, end, length, slice(start, start + len(blocks)), window)
    return ContextPlan(begin, end, length, blocks, window)


def causal_mask(length: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """[TILE, length], added to scores: 0 where a query sees a key, else -inf. Aligned bottom right, so that
    `mask[-rows:, -keys:]` fits every tile of `rows` tokens that ends at the last of `keys` keys."""
    # Query row i belongs to the same token as key past + i.
    past = length - TILE
    visible = torch.ones(TILE, length, dtype=torch.bool).tril(past)
    if window is not None:
        visible = visible.triu(past - window + 1)
    return torch.zeros(TILE, length, dtype=dtype).masked_fill_(~visible, -torch.inf)


def attend_context(query: Tensor, cache: LayerCache, plan: ContextPlan, mask: Tensor, heads: HeadShape) -> Tensor:
    """query [Q, heads, head_dim] of this sequence -> output of the same shape. The mask is at least `plan.widest`
    wide."""
    keys, values = (pool[plan.blocks].flatten(0, 1).transpose(0, 1)[None] for pool in (cache.keys, cache.values))
    # Tiles keep the mask small and skip keys that causality or the window rules out.
    past = plan.length - len(query)
    tiles = []
    for begin in range(0, len(query), TILE):
        rows = query[begin : begin + TILE]
        last = past + begin + len(rows)
        first = 0 if plan.window is None else max(0, past + begin - plan.window + 1)
        tile = F.scaled_dot_product_attention(
            rows.transpose(0, 1)[None],
            keys[:, :, first:last],
            values[:, :, first:last],
            attn_mask=mask[TILE - len(rows) :, mask.shape[1] - (last - first) :],
            scale=heads.scale,
            enable_gqa=heads.group > 1,
        )
        tiles.append(tile[0].transpose(0, 1))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A step's indices and buffers, shared by all layers with the same window.

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


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's sequences for layers with the same window: those with one query token, and the others."""

    generation: GenerationPlan | None
    contexts: tuple[ContextPlan, ...]


@dataclass(frozen=True, slots=True)
class CpuInputs(AttentionInputs):
    """`AttentionInputs` with a plan per window."""

    stored: Tensor | None
    """[S] int64: indices of the tokens that are not padding; None: all tokens."""
    plans: Mapping[int | None, CpuPlan]


class CpuAttention:
    """Vectorized torch operations over the cache's pages. The output of padding is zeros."""

    name = "cpu"
    graphs = False
    context_graphs = False

    def __init__(self, heads: HeadShape, windows: Iterable[int | None] = (None,)) -> None:
        self._heads = heads
        self._windows = frozenset(windows)
        self._masks: dict[int | None, Tensor] = {}
        silence_warning()

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> CpuInputs:
        # Computed once per step, so that the layers store without a mask if there is no padding.
        padded = len(inputs.slots) > int(inputs.query_start[-1]) or bool((inputs.slots < 0).any())
        # A window wider than every context of the step has no effect: such layers share the plan without a window.
        narrow = {window: window if window and window < inputs.max_context else None for window in self._windows}
        plans = {window: self._plan(inputs, cache, window) for window in set(narrow.values())}
        return CpuInputs(
            **inputs.shared(),
            stored=torch.nonzero(inputs.slots >= 0).view(-1) if padded else None,
            plans={window: plans[narrow[window]] for window in self._windows},
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs, window: int | None
    ) -> Tensor:
        if not isinstance(inputs, CpuInputs):
            raise TypeError("prepare() comes before attend()")
        if inputs.stored is None:
            cache.store(key, value, inputs.slots)
        else:
            cache.store(key[inputs.stored], value[inputs.stored], inputs.slots[inputs.stored])
        plan = inputs.plans[window]
        single = plan.generation
        # The common case, a step of generation rows only, needs no scatter.
        if single is not None and single.rows is None:
            return attend_generation(query, cache, single, self._heads.scale)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if single is not None and single.rows is not None:
            rows = query.index_select(0, single.rows)
            out.index_copy_(0, single.rows, attend_generation(rows, cache, single, self._heads.scale))
        for part in plan.contexts:
            rows = query[part.begin : part.end]
            out[part.begin : part.end] = attend_context(rows, cache, part, self._mask(part, query.dtype), self._heads)
        return out

    def _plan(self, inputs: AttentionInputs, cache: KVCache, window: int | None) -> CpuPlan:
        bounds = inputs.query_start.numpy()
        queries = np.diff(bounds)
        lengths = inputs.context_lengths.numpy()
        live = (queries > 0) & (lengths > 0)
        # Sparse products do not support half precision: single tokens are then treated like context.
        single = live & (queries == 1) & (cache.dtype == torch.float32)
        size = cache.tokens_per_block
        return CpuPlan(
            self._plan_generation(inputs, np.flatnonzero(single), cache, window) if single.any() else None,
            tuple(
                plan_context(int(bounds[i]), int(bounds[i + 1]), int(lengths[i]), inputs.block_tables[i], size, window)
                for i in np.flatnonzero(live & ~single)
            ),
        )

    def _plan_generation(
        self, inputs: AttentionInputs, single: NDArray[np.int64], cache: KVCache, window: int | None
    ) -> GenerationPlan:
        every = len(single) == len(inputs.slots)
        return plan_generation(
            None if every else inputs.query_start.numpy()[single].astype(np.int64),
            inputs.block_tables.numpy()[single],
            inputs.context_lengths.numpy()[single],
            self._heads,
            cache,
            window,
        )

    def _mask(self, plan: ContextPlan, dtype: torch.dtype) -> Tensor:
        """A mask at least as wide as the plan needs. Cached; its width grows in powers of two."""
        mask = self._masks.get(plan.window)
        if mask is None or plan.widest > mask.shape[1] or dtype != mask.dtype:
            width = max(TILE, 1 << (plan.widest - 1).bit_length())
            mask = self._masks[plan.window] = causal_mask(width, dtype, plan.window)
        return mask

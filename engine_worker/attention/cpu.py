"""The CPU backend: all generation rows in one batch, sequences with context one by one. Needs no compiler."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.generation import GenerationPlan, attend_generation, plan_generation, silence_warning

TILE = 256
"""Query tokens per call. Keys after a tile's last token, or before the window of its first, are skipped."""


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
class CpuPlan:
    """A step's sequences for layers with the same window: those with one query token, and the others."""

    generation: GenerationPlan | None
    contexts: tuple[ContextPlan, ...]


@dataclass(frozen=True, slots=True)
class CpuInputs(AttentionInputs):
    """`AttentionInputs` with a plan per window."""

    stored: Tensor | None
    """[S] int64: indexes of the tokens that are not padding; None: all tokens."""
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

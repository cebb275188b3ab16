"""The CPU backend: all generation rows at once, context slices one by one. Needs no compiler."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.context import TILE, ContextPlan, attend_context, causal_mask, plan_context
from engine_worker.attention.generation import GenerationPlan, attend_generation, plan_generation, silence_warning
from engine_worker.attention.inputs import AttentionInputs


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's sequences, split by query length, for layers with the same window."""

    generation: GenerationPlan | None
    contexts: tuple[ContextPlan, ...]


@dataclass(frozen=True, slots=True)
class CpuInputs(AttentionInputs):
    """`AttentionInputs` with a plan per window."""

    stored: Tensor | None
    """[S] int64: tokens that are not padding; None: all."""
    plans: Mapping[int | None, CpuPlan]
    """By window."""


class CpuAttention:
    """Vectorized torch over the cache's pages. Padding comes out as zeros."""

    name = "cpu"
    graphs = False

    def __init__(self, heads: HeadShape, windows: Iterable[int | None] = (None,)) -> None:
        self._heads = heads
        self._windows = frozenset(windows)
        self._masks: dict[int | None, Tensor] = {}
        silence_warning()

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> CpuInputs:
        # Known once per step, so that every layer can store without a mask.
        padded = len(inputs.slots) > int(inputs.query_start[-1]) or bool((inputs.slots < 0).any())
        # A window wider than every context of the step equals no window: such layers share a plan.
        narrow = {window: window if window and window < inputs.max_context else None for window in self._windows}
        plans = {window: self._plan(inputs, cache, window) for window in set(narrow.values())}
        return CpuInputs(
            **inputs.shared(),
            stored=torch.nonzero(inputs.slots >= 0).view(-1) if padded else None,
            plans={window: plans[narrow[window]] for window in self._windows},
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        inputs: AttentionInputs,
        window: int | None = None,
    ) -> Tensor:
        if not isinstance(inputs, CpuInputs):
            raise TypeError("prepare() comes before attend()")
        if inputs.stored is None:
            cache.store(key, value, inputs.slots)
        else:
            cache.store(key[inputs.stored], value[inputs.stored], inputs.slots[inputs.stored])
        plan = inputs.plans[window]
        single = plan.generation
        # The common case, a step of generation rows only, needs no scattering.
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
        # Sparse products support no half precision: single tokens then count as context slices.
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
        """At least as wide as the plan needs; cached, and grown in powers of two."""
        mask = self._masks.get(plan.window)
        if mask is None or plan.widest > mask.shape[1] or dtype != mask.dtype:
            width = max(TILE, 1 << (plan.widest - 1).bit_length())
            mask = self._masks[plan.window] = causal_mask(width, dtype, plan.window)
        return mask

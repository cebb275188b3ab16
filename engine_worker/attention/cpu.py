"""The CPU backend: generation rows together, context slices one by one. Needs no compiler."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention import context, generation
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.inputs import AttentionInputs


@dataclass(frozen=True, slots=True)
class CpuInputs(AttentionInputs):
    """The inputs, planned."""

    stored: Tensor | None
    """[S] int64: tokens that are no padding; None when there is no padding."""
    generation: generation.GenerationPlan | None
    contexts: tuple[context.ContextPlan, ...]


class CpuAttention:
    """Vectorised torch over the cache's pages."""

    name = "cpu"

    def __init__(self, heads: HeadShape) -> None:
        self._heads = heads
        self._mask = context.causal_mask(context.TILE, torch.float32)
        generation.quiet()

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> CpuInputs:
        """Split the sequences by query length: one token, or more."""
        bounds = inputs.query_start.numpy()
        queries = np.diff(bounds)
        lengths = inputs.context_lengths.numpy()
        live = (queries > 0) & (lengths > 0)
        # The sparse product knows no half precision.
        single = live & (queries == 1) & (cache.dtype == torch.float32)
        padded = len(inputs.slots) > bounds[-1] or bool((inputs.slots < 0).any())
        return CpuInputs(
            slots=inputs.slots,
            block_tables=inputs.block_tables,
            query_start=inputs.query_start,
            context_lengths=inputs.context_lengths,
            max_query=inputs.max_query,
            max_context=inputs.max_context,
            stored=torch.nonzero(inputs.slots >= 0).view(-1) if padded else None,
            generation=self._plan_generation(inputs, np.flatnonzero(single), cache) if single.any() else None,
            contexts=tuple(
                context.plan(
                    int(bounds[i]), int(bounds[i + 1]), int(lengths[i]), inputs.block_tables[i], cache.tokens_per_block
                )
                for i in np.flatnonzero(live & ~single)
            ),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs) -> Tensor:
        """See `AttentionBackend.attend`. Padding comes out as zeros. Raises TypeError where prepare() did not come
        first."""
        if not isinstance(inputs, CpuInputs):
            raise TypeError("prepare() comes before attend()")
        if inputs.stored is None:
            cache.store(key, value, inputs.slots)
        else:
            cache.store(key[inputs.stored], value[inputs.stored], inputs.slots[inputs.stored])
        single = inputs.generation
        if single is not None and single.rows is None:
            return generation.attend(query, cache, single, self._heads.scale)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if single is not None and single.rows is not None:
            rows = query.index_select(0, single.rows)
            out.index_copy_(0, single.rows, generation.attend(rows, cache, single, self._heads.scale))
        for plan in inputs.contexts:
            mask = self._causal_mask(plan.length, query.dtype)
            out[plan.begin : plan.end] = context.attend(query[plan.begin : plan.end], cache, plan, mask, self._heads)
        return out

    def _plan_generation(
        self, inputs: AttentionInputs, single: NDArray[np.int64], cache: KVCache
    ) -> generation.GenerationPlan:
        every = len(single) == len(inputs.slots)
        return generation.plan(
            None if every else inputs.query_start.numpy()[single].astype(np.int64),
            inputs.block_tables.numpy()[single],
            inputs.context_lengths.numpy()[single],
            self._heads,
            cache,
        )

    def _causal_mask(self, length: int, dtype: torch.dtype) -> Tensor:
        """At least `length` keys wide; kept, and doubled when it is too narrow."""
        if length > self._mask.shape[1] or dtype != self._mask.dtype:
            width = max(context.TILE, 1 << (length - 1).bit_length())
            self._mask = context.causal_mask(width, dtype)
        return self._mask

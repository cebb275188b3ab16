"""The CPU backend: generation rows together, context slices one by one. Needs no compiler."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_worker.attention import context, generation
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import LayerCache
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

    def __init__(self, heads: HeadShape, tokens_per_block: int, dtype: torch.dtype) -> None:
        self._heads = heads
        self._tokens_per_block = tokens_per_block
        self._dtype = dtype
        self._mask = context.causal_mask(context.TILE, dtype)

    def prepare(self, inputs: AttentionInputs) -> CpuInputs:
        """Split the sequences by query length: one token, or more."""
        bounds = inputs.query_start.numpy()
        queries = np.diff(bounds)
        lengths = inputs.context_lengths.numpy()
        single = np.flatnonzero((queries == 1) & (lengths > 0))
        padded = len(inputs.slots) > bounds[-1] or bool((inputs.slots < 0).any())
        return CpuInputs(
            slots=inputs.slots,
            block_tables=inputs.block_tables,
            query_start=inputs.query_start,
            context_lengths=inputs.context_lengths,
            max_query=inputs.max_query,
            max_context=inputs.max_context,
            stored=torch.nonzero(inputs.slots >= 0).view(-1) if padded else None,
            generation=self._plan_generation(inputs, single) if len(single) else None,
            contexts=tuple(
                context.plan(
                    int(bounds[i]), int(bounds[i + 1]), int(lengths[i]), inputs.block_tables[i], self._tokens_per_block
                )
                for i in np.flatnonzero(queries > 1)
            ),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs) -> Tensor:
        """See `AttentionBackend.attend`. Padding comes out as zeros."""
        planned = inputs if isinstance(inputs, CpuInputs) else self.prepare(inputs)
        if planned.stored is None:
            cache.store(key, value, planned.slots)
        else:
            stored = planned.stored
            cache.store(key[stored], value[stored], planned.slots[stored])
        single = planned.generation
        if single is not None and single.rows is None:
            return generation.attend(query, cache, single, self._heads.scale)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if single is not None and single.rows is not None:
            rows = query.index_select(0, single.rows)
            out.index_copy_(0, single.rows, generation.attend(rows, cache, single, self._heads.scale))
        for plan in planned.contexts:
            mask = self._causal_mask(plan.length)
            out[plan.begin : plan.end] = context.attend(query[plan.begin : plan.end], cache, plan, mask, self._heads)
        return out

    def _plan_generation(self, inputs: AttentionInputs, single: np.ndarray) -> generation.GenerationPlan:
        every = len(single) == len(inputs.slots)
        return generation.plan(
            None if every else inputs.query_start.numpy()[single].astype(np.int64),
            inputs.block_tables.numpy()[single],
            inputs.context_lengths.numpy()[single],
            self._heads,
            self._tokens_per_block,
            self._dtype,
        )

    def _causal_mask(self, length: int) -> Tensor:
        """At least `length` keys wide; kept, and doubled when it is too narrow."""
        if length > self._mask.shape[1]:
            self._mask = context.causal_mask(1 << (length - 1).bit_length(), self._dtype)
        return self._mask

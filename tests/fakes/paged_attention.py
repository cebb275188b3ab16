"""An attention backend in plain torch that reads no tensor on the host, so that graphs can capture its steps."""

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache, store_by_torch
from engine_worker.attention.reference import ReferenceAttention


class PagedTorch:
    """Attends over whole block tables in generation steps and in captured context steps; else like `reference`."""

    name = "paged torch"
    graphs = True
    context_graphs = True

    def __init__(self, heads: HeadShape) -> None:
        self._heads = heads
        self._reference = ReferenceAttention(heads)

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> AttentionInputs:
        return inputs

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        inputs: AttentionInputs,
        window: int | None = None,
    ) -> Tensor:
        if inputs.max_query > 1 and not inputs.captured_context:
            return self._reference.attend(query, key, value, cache, inputs, window)
        store_by_torch(cache, key, value, inputs.slots)
        lengths, tables = inputs.context_lengths, inputs.block_tables
        if inputs.captured_context:
            lengths, tables = _by_token(inputs, len(query))
        keys, values = (
            pool.index_select(0, tables.reshape(-1))
            .view(len(query), -1, *pool.shape[2:])
            .repeat_interleave(self._heads.group, dim=2)
            for pool in (cache.keys, cache.values)
        )
        positions = torch.arange(keys.shape[1]).expand(len(query), -1)
        lengths = lengths[:, None]
        masked = positions >= lengths
        if window is not None:
            masked |= positions < lengths - window
        scores = torch.einsum("bhd,blhd->bhl", query, keys) * self._heads.scale
        # Values outside of the context may be NaN, which a weight of 0 would not cancel.
        scores = scores.masked_fill(masked[:, None], -torch.inf)
        values = values.masked_fill(masked[:, :, None, None], 0.0)
        return torch.einsum("bhl,blhd->bhd", scores.softmax(-1), values)


def _by_token(inputs: AttentionInputs, count: int) -> tuple[Tensor, Tensor]:
    """The context length [T] and block table [T, M] of each token; arbitrary for padding."""
    tokens, ends = torch.arange(count, dtype=torch.int32), inputs.query_start[1:].contiguous()
    sequence = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)
    later = ends.index_select(0, sequence) - 1 - tokens
    return inputs.context_lengths.index_select(0, sequence) - later, inputs.block_tables.index_select(0, sequence)

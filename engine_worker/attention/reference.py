"""The reference backend: attention by its definition, one sequence at a time, in float32. Every other backend is tested
against it."""

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache, store_by_torch


class ReferenceAttention:
    """Plain torch on any device; slow. The output of padding is zeros."""

    name = "reference"
    graphs = False
    context_graphs = False

    def __init__(self, heads: HeadShape) -> None:
        self._heads = heads

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> AttentionInputs:  # noqa: ARG002
        return inputs

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs, window: int | None
    ) -> Tensor:
        store_by_torch(cache, key, value, inputs.slots)
        out = torch.zeros_like(query)
        bounds = inputs.query_start.tolist()
        for i, length in enumerate(inputs.context_lengths.tolist()):
            begin, end = bounds[i], bounds[i + 1]
            # Keys before the window of the first query token must not be read: their blocks may have been reused.
            first = 0 if window is None else max(0, length - (end - begin) - window + 1)
            keys, values = (_gather(pool, inputs.block_tables[i], first, length) for pool in (cache.keys, cache.values))
            out[begin:end] = self._attend(query[begin:end], keys, values, window)
        return out

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Query [Q, heads, head_dim], keys and values [L, kv_heads, head_dim] -> [Q, heads, head_dim]."""
        query_length, length = query.shape[0], keys.shape[0]
        keys, values = (x.float().repeat_interleave(self._heads.group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,lhd->hql", query.float(), keys) * self._heads.scale
        past = length - query_length
        visible = torch.ones(query_length, length, dtype=torch.bool, device=query.device).tril(past)
        if window is not None:
            visible = visible.triu(past - window + 1)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return torch.einsum("hql,lhd->qhd", weights, values).to(query.dtype)


def _gather(pool: Tensor, block_table: Tensor, first: int, length: int) -> Tensor:
    """Read tokens [first, length) of a sequence from a pool [num_blocks, tokens_per_block, kv_heads, head_dim] ->
    [length - first, kv_heads, head_dim]."""
    tokens_per_block = pool.shape[1]
    skipped = first // tokens_per_block
    blocks = block_table[skipped : -(-length // tokens_per_block)].long()
    return pool[blocks].flatten(0, 1)[first - skipped * tokens_per_block : length - skipped * tokens_per_block]

"""Random attention steps over a paged cache with random content."""

from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache

CPU = torch.device("cpu")
GONE = 1 << 24
"""A block number beyond the end of every pool here: reading it raises."""


@dataclass(frozen=True)
class PagedStep:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pool: KVCache
    inputs: AttentionInputs


def paged_step(
    heads: HeadShape,
    sequences: list[tuple[int, int]],
    *,
    tokens_per_block: int = 16,
    padding: int = 0,
    scattered: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device = CPU,
) -> PagedStep:
    """sequences: (tokens already in the cache, tokens of this step) of each. padding: number of tokens with slot -1 at
    the end. scattered: assign blocks in random order."""
    random = torch.Generator().manual_seed(seed)
    needed = [-(-(past + query) // tokens_per_block) for past, query in sequences]
    pool = KVCache(1, sum(needed) + 3, tokens_per_block, heads.num_kv_heads, heads.head_dim, dtype, device)
    cache = pool.layers[0]
    for blocks in pools(cache):
        blocks.copy_(torch.randn(blocks.shape, generator=random))
    order = torch.randperm(pool.num_blocks, generator=random) if scattered else torch.arange(pool.num_blocks)
    tables = torch.full((len(sequences), max(needed)), -7, dtype=torch.int32)
    slots = []
    for i, (blocks, (past, query)) in enumerate(zip(order[: sum(needed)].split(needed), sequences, strict=True)):
        tables[i, : needed[i]] = blocks
        positions = torch.arange(past, past + query)
        slots.append(blocks[positions // tokens_per_block] * tokens_per_block + positions % tokens_per_block)
    slots.append(torch.full((padding,), -1))
    total = sum(query for _, query in sequences) + padding

    def tokens(count: int) -> torch.Tensor:
        return torch.randn(total, count, heads.head_dim, generator=random).to(device, dtype)

    inputs = AttentionInputs(
        slots=torch.cat(slots).long().to(device),
        block_tables=tables.to(device),
        query_start=torch.tensor([0, *(query for _, query in sequences)]).cumsum(0).int().to(device),
        context_lengths=torch.tensor([past + query for past, query in sequences], dtype=torch.int32).to(device),
        generation_rows=len(list(takewhile(lambda sequence: sequence[1] == 1, sequences))),
        max_query=max(query for _, query in sequences),
        max_context=max(past + query for past, query in sequences),
    )
    return PagedStep(tokens(heads.num_heads), tokens(heads.num_kv_heads), tokens(heads.num_kv_heads), pool, inputs)


def drop_blocks_before_window(step: PagedStep, window: int) -> PagedStep:
    """Replace the table entries of blocks that lie entirely before the window of a sequence's first query token by an
    invalid block number."""
    inputs, size = step.inputs, step.pool.tokens_per_block
    queries = inputs.query_start.diff()
    tables = inputs.block_tables.clone()
    for table, past in zip(tables, (inputs.context_lengths - queries).tolist(), strict=True):
        table[: max(0, past - window + 1) // size] = GONE
    return replace(step, inputs=replace(inputs, block_tables=tables))


def pools(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.keys, cache.values


def attend(backend: AttentionBackend, step: PagedStep, window: int | None = None) -> tuple[torch.Tensor, LayerCache]:
    """The output, and the cache afterwards, which is a copy: the step's own cache does not change."""
    cache = step.pool.layers[0].copy()
    inputs = backend.prepare(step.inputs, step.pool)
    return backend.attend(step.query, step.key, step.value, cache, inputs, window), cache

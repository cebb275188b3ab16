"""A backend against the reference, on the machine that it is to run on."""

from collections.abc import Iterable

import torch

from engine_worker.attention.backend import AttentionBackend, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.refusal import Refusal, RefusedError

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of numbers about one."""
STEPS = (((0, 1), (699, 1), (400, 1)), ((0, 5), (300, 40), (650, 1)))
"""(tokens in the cache, tokens of the step) of each sequence: a generation step long enough to be split over a GPU, and
one with context."""
WINDOW = 100


def try_out(
    backend: AttentionBackend,
    heads: HeadShape,
    windows: Iterable[int | None],
    tokens_per_block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises RefusedError where it does not agree, and whatever the backend raises."""
    reference = ReferenceAttention(heads)
    for sequences in STEPS:
        pool, inputs = _step(sequences, heads, tokens_per_block, dtype, device)
        random = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(len(inputs.slots), count, heads.head_dim, generator=random).to(device, dtype)
            for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        prepared = backend.prepare(inputs, pool)
        for window in {None if window is None else WINDOW for window in windows}:
            expected = reference.attend(query, key, value, _copy(pool.layers[0]), inputs, window)
            found = backend.attend(query, key, value, _copy(pool.layers[0]), prepared, window)
            error = float((found.float() - expected.float()).abs().max())
            if not error <= TOLERANCE[dtype]:
                reason = f"tried out, it is off by {error:.2g} in a step of {sequences}, window {window}"
                raise RefusedError(Refusal.WRONG, reason)


def _step(
    sequences: tuple[tuple[int, int], ...],
    heads: HeadShape,
    tokens_per_block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KVCache, AttentionInputs]:
    """With blocks in reverse, so that neighbours are none."""
    needed = [-(-(past + query) // tokens_per_block) for past, query in sequences]
    pool = KVCache(1, sum(needed), tokens_per_block, heads.num_kv_heads, heads.head_dim, dtype, device)
    random = torch.Generator().manual_seed(1)
    for blocks in (pool.layers[0].keys, pool.layers[0].values):
        blocks.copy_(torch.randn(blocks.shape, generator=random))
    blocks_left = torch.arange(sum(needed)).flip(0)
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    slots = []
    for row, (own, (past, query)) in enumerate(zip(blocks_left.split(needed), sequences, strict=True)):
        tables[row, : len(own)] = own
        positions = torch.arange(past, past + query)
        slots.append(own[positions // tokens_per_block] * tokens_per_block + positions % tokens_per_block)
    queries = torch.tensor([0, *(query for _, query in sequences)], dtype=torch.int32)
    return pool, AttentionInputs(
        slots=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        query_start=queries.cumsum(0, dtype=torch.int32).to(device),
        context_lengths=torch.tensor([past + query for past, query in sequences], dtype=torch.int32).to(device),
        max_query=int(queries.max()),
        max_context=max(past + query for past, query in sequences),
    )


def _copy(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.keys.clone(), cache.values.clone())

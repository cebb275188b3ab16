"""A backend against the reference, on the machine that it is to run on."""

from collections.abc import Iterable
from itertools import takewhile

import torch

from engine_worker.attention.backend import AttentionBackend, HeadShape
from engine_worker.attention.cache import KVCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.refusal import Refusal, RefusedError
from engine_worker.attention.store import Store, plain

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of numbers about one."""
STEPS = (((0, 1), (699, 1), (400, 1)), ((0, 1), (5, 1)), ((700, 1), (0, 5), (300, 40), (650, 1)))
"""(tokens in the cache, tokens of the step) of each sequence: a generation step long enough to be split over a GPU, one
that is not, and one with context. What is compiled for serving is compiled here."""
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
            expected = reference.attend(query, key, value, pool.layers[0].copy(), inputs, window)
            found = backend.attend(query, key, value, pool.layers[0].copy(), prepared, window)
            error = float((found.float() - expected.float()).abs().max())
            if not error <= TOLERANCE[dtype]:
                reason = f"tried out, it is off by {error:.2g} in a step of {sequences}, window {window}"
                raise RefusedError(Refusal.WRONG, reason)


def try_store(store: Store, heads: HeadShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raises RefusedError where it does not do what `plain` does, and whatever it raises."""
    shape = (3, heads.num_kv_heads, heads.head_dim)
    key, value = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    slots = torch.tensor([2, 0, -1], device=device)
    pools = []
    for one in (store, plain):
        cache = KVCache(1, 2, 2, *shape[1:], dtype, device).layers[0]
        one(cache, key, value, slots)
        pools.append(torch.stack((cache.keys, cache.values)))
    if not torch.equal(*pools):
        raise RefusedError(Refusal.WRONG, "tried out, keys and values are not where they belong")


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
        generation_rows=len(list(takewhile(lambda sequence: sequence[1] == 1, sequences))),
        max_query=int(queries.max()),
        max_context=max(past + query for past, query in sequences),
    )

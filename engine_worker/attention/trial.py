"""Tests a backend against the reference, on this machine and with the heads of the model to be served."""

from dataclasses import replace
from itertools import takewhile

import torch
import torch.nn.functional as F

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, Refusal, RefusedError, Site
from engine_worker.attention.cache import KVCache, store_by_torch
from engine_worker.attention.paged import Store
from engine_worker.attention.reference import ReferenceAttention

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest allowed absolute error; outputs are about 1."""
Sequences = tuple[tuple[int, int], ...]
"""(tokens in the cache, tokens of the step) of each sequence."""
STEPS: tuple[Sequences, ...] = (((0, 1), (699, 1), (400, 1)), ((0, 1), (5, 1)), ((700, 1), (0, 5), (300, 40), (650, 1)))
"""A generation step with contexts long enough to be split over a GPU, one with short contexts, and a step with context.
They also compile every kernel variant that serving needs."""
# Narrower than the longest test context, and not a multiple of a block or a tile.
WINDOW = 100


def verify_backend(backend: AttentionBackend, site: Site, tokens_per_block: int) -> None:
    """Raises RefusedError if the backend's results differ from the reference's, and any error that the backend
    raises."""
    for sequences in STEPS:
        _verify(backend, site, tokens_per_block, sequences, captured=False)


def verify_captured(backend: AttentionBackend, site: Site, tokens_per_block: int) -> None:
    """The same for the kernels that a CUDA graph of steps with context launches."""
    _verify(backend, site, tokens_per_block, STEPS[-1], captured=True)


def _verify(
    backend: AttentionBackend, site: Site, tokens_per_block: int, sequences: Sequences, *, captured: bool
) -> None:
    heads, dtype = site.heads, site.dtype
    pool, inputs = _step(sequences, site, tokens_per_block)
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(len(inputs.slots), count, heads.head_dim, generator=random).to(site.device, dtype)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    reference = ReferenceAttention(heads)
    prepared = backend.prepare(as_captured(inputs) if captured else inputs, pool)
    for window in {None if window is None else WINDOW for window in site.windows}:
        expected = reference.attend(query, key, value, pool.layers[0].copy(), inputs, window)
        computed = backend.attend(query, key, value, pool.layers[0].copy(), prepared, window)
        error = float((computed.float() - expected.float()).abs().max())
        # Not `error > ...`: a NaN must fail too.
        if not error <= TOLERANCE[dtype]:
            reason = f"off by {error:.2g} in a test step of {sequences}, window {window}"
            raise RefusedError(Refusal.WRONG, reason)


def as_captured(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs in the form that a CUDA graph of steps with context has, with one padding sequence."""
    return replace(
        inputs,
        block_tables=F.pad(inputs.block_tables, (0, 0, 0, 1)),
        query_start=torch.cat((inputs.query_start, inputs.query_start[-1:])),
        context_lengths=F.pad(inputs.context_lengths, (0, 1)),
        generation_rows=0,
        max_query=len(inputs.slots),
        captured_context=True,
    )


def verify_store(store: Store, site: Site) -> None:
    """Raises RefusedError if the cache differs from what `store_by_torch` writes, and any error that the store
    raises."""
    shape, device = (3, site.heads.num_kv_heads, site.heads.head_dim), site.device
    key, value = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2)).to(device, site.dtype)
    slots = torch.tensor([2, 0, -1], device=device)
    pools = []
    for store_function in (store, store_by_torch):
        cache = KVCache(1, 2, 2, *shape[1:], site.dtype, device).layers[0]
        store_function(cache, key, value, slots)
        pools.append(torch.stack((cache.keys, cache.values)))
    if not torch.equal(*pools):
        raise RefusedError(Refusal.WRONG, "in a test, keys and values are not in their slots")


def _step(sequences: Sequences, site: Site, tokens_per_block: int) -> tuple[KVCache, AttentionInputs]:
    """A cache with random content, and a step's inputs. Blocks are assigned in reverse order, so that no sequence is
    contiguous in the pool."""
    heads, device = site.heads, site.device
    needed = [-(-(past + query) // tokens_per_block) for past, query in sequences]
    pool = KVCache(1, sum(needed), tokens_per_block, heads.num_kv_heads, heads.head_dim, site.dtype, device)
    random = torch.Generator().manual_seed(1)
    for blocks in (pool.layers[0].keys, pool.layers[0].values):
        blocks.copy_(torch.randn(blocks.shape, generator=random))
    all_blocks = torch.arange(sum(needed)).flip(0)
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    slots = []
    for row, (blocks, (past, query)) in enumerate(zip(all_blocks.split(needed), sequences, strict=True)):
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(past, past + query)
        slots.append(blocks[positions // tokens_per_block] * tokens_per_block + positions % tokens_per_block)
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

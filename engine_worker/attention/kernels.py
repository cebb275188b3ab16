"""Triton kernels; the only importer of triton, itself imported where one is wanted."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.attention.cache import LayerCache
from engine_worker.attention.paged import PagedInputs

SPLITS = 64
"""Of a sequence's keys, at most."""
ROUNDS = 2
"""Programs per multiprocessor that splitting goes for."""
TILE_BYTES = 1 << 15
"""Of query rows, and of keys and values together, in one round of a program: with two rounds on their way at once that
is what any GPU's multiprocessor has room for."""


@triton.jit
def _store(key, value, keys, values, slots, key_stride, value_stride, size, WIDTH: tl.constexpr):
    """A token: `size` numbers of its key and its value to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, WIDTH)
        inside = at < size
        tl.store(keys + slot * size + at, tl.load(key + token * key_stride + at, mask=inside), mask=inside)
        tl.store(values + slot * size + at, tl.load(value + token * value_stride + at, mask=inside), mask=inside)


def store(cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `engine_worker.attention.store.Store`."""
    key, value = _rows(key), _rows(value)
    size = key.shape[1]
    width = triton.next_power_of_2(size)
    strides = key.stride(0), value.stride(0)
    _store[(len(slots),)](key, value, cache.keys, cache.values, slots, *strides, size, WIDTH=width)


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    query, keys, values, out, sums, tops, totals, tables, query_start, lengths, scale, query_stride, table_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A KV head, a share of a sequence's keys, and ROWS pairs of a query token and one of the head's query heads.

    Online softmax (arXiv:1805.02867). With one share the output, else what `_combine` needs.
    """
    tile, sequence = tl.program_id(0), tl.program_id(2)
    head, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    past = tl.load(lengths + sequence) - count
    if tile * ROWS < count * GROUP:
        row = tile * ROWS + tl.arange(0, ROWS)
        token = row // GROUP
        live = token < count
        position = past + token
        at = tl.arange(0, DIMS)
        inside = live[:, None] & (at < HEAD_DIM)[None, :]
        query_head = head * GROUP + row % GROUP
        place = (begin + token).to(tl.int64) * query_stride + query_head * HEAD_DIM
        rows = tl.load(query + place[:, None] + at[None, :], mask=inside, other=0.0)

        end = past + tl.minimum(count, (tile * ROWS + ROWS - 1) // GROUP + 1)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(0, past + tile * ROWS // GROUP - WINDOW + 1)
        share = tl.cdiv(tl.cdiv(end - first, KEYS), SPLITS) * KEYS
        low = first + split * share
        high = tl.minimum(end, low + share)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, DIMS], tl.float32)
        for start in range(low, high, KEYS):
            key = start + tl.arange(0, KEYS)
            there = key < high
            block = tl.load(tables + sequence * table_stride + key // PAGE, mask=there, other=0).to(tl.int64)
            slot = ((block * PAGE + key % PAGE) * KV_HEADS + head) * HEAD_DIM
            wanted = there[:, None] & (at < HEAD_DIM)[None, :]
            columns = tl.load(keys + slot[:, None] + at[None, :], mask=wanted, other=0.0)
            scores = tl.dot(rows, tl.trans(columns), input_precision="ieee") * scale
            seen = (key[None, :] <= position[:, None]) & there[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet has no top: what it has is nothing times one.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weights, 1)
            content = tl.load(values + slot[:, None] + at[None, :], mask=wanted, other=0.0)
            found = tl.dot(weights.to(content.dtype), content, input_precision="ieee")
            weighted = weighted * shrink[:, None] + found
            top = higher

        target = (begin + token).to(tl.int64) * (GROUP * KV_HEADS) + query_head
        if SPLITS == 1:
            mean = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + target[:, None] * HEAD_DIM + at[None, :], mean.to(out.dtype.element_ty), mask=inside)
        else:
            target = target * SPLITS + split
            tl.store(tops + target, top, mask=live)
            tl.store(totals + target, total, mask=live)
            tl.store(sums + target[:, None] * HEAD_DIM + at[None, :], weighted, mask=inside)


@triton.jit
def _combine(sums, tops, totals, out, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr):
    """The shares of one query token and head."""
    pair = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = at < HEAD_DIM
    top = tl.load(tops + pair * SPLITS + split)
    highest = tl.max(top, 0)
    weights = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(totals + pair * SPLITS + split) * weights, 0)
    parts = tl.load(sums + (pair * SPLITS + split)[:, None] * HEAD_DIM + at[None, :], mask=inside[None, :], other=0.0)
    mean = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + pair * HEAD_DIM + at, mean.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, cache: LayerCache, inputs: PagedInputs, scale: float, window: int | None) -> Tensor:
    """See `engine_worker.attention.paged.Attend`. Generation steps split long contexts over the GPU."""
    tokens, num_heads, head_dim = query.shape
    page, kv_heads = cache.keys.shape[1:3]
    group, batch = num_heads // kv_heads, len(inputs.context_lengths)
    dims = max(16, triton.next_power_of_2(head_dim))
    in_tile = TILE_BYTES // (dims * query.itemsize)
    rows = max(16, triton.next_power_of_2(group) if inputs.generation else min(128, in_tile))
    keys = max(16, min(64, in_tile // 2))
    splits = _splits(inputs, batch * kv_heads, keys, query.device) if inputs.generation else 1
    out = torch.empty((tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    sums = tops = totals = out
    if splits > 1:
        shape = (tokens, num_heads, splits)
        tops, totals = torch.empty((2, *shape), dtype=torch.float32, device=query.device)
        sums = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    query = _rows(query)
    grid = (triton.cdiv(inputs.max_query * group, rows), kv_heads * splits, batch)
    _attend[grid](
        query, cache.keys, cache.values, out, sums, tops, totals, inputs.block_tables, inputs.query_start,
        inputs.context_lengths, scale, query.stride(0), inputs.block_tables.stride(0),
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=dims, PAGE=page,
        ROWS=rows, KEYS=keys, SPLITS=splits, WINDOW=window or 0, num_stages=2,
        num_warps=4 if inputs.generation else 8,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens * num_heads,)](sums, tops, totals, out, HEAD_DIM=head_dim, DIMS=dims, SPLITS=splits)
    return out


def _splits(inputs: PagedInputs, programs: int, keys: int, device: torch.device) -> int:
    """A power of two: as many as keep the GPU busy, and no more than the longest context has tiles of keys."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SPLITS
    useful = min(SPLITS, ROUNDS * cores // programs, triton.cdiv(inputs.max_context, keys))
    return 1 << max(0, useful.bit_length() - 1)


def _rows(heads: Tensor) -> Tensor:
    """[T, heads, head_dim] -> [T, heads * head_dim], copied only where heads do not lie side by side."""
    together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return (heads if together else heads.contiguous()).flatten(1)

"""Sluice's attention kernels in Triton. This module imports triton, so import it only where the kernels are used.

Attention is that of FlashAttention-2 (arXiv:2307.08691) with an online softmax (arXiv:1805.02867), over a paged cache
(arXiv:2309.06180). The keys of generation rows are split as in Flash-decoding; see `split`.

Shapes and layouts; T tokens of B sequences, H query heads, K KV heads of dimension D, GROUP = H / K:

- query [T, H, D], key and value [T, K, D]: the heads of a token are contiguous (`_rows` copies them otherwise); the
  stride between tokens is free, so views of a fused QKV product need no copy.
- keys, values (the cache) [num_blocks, tokens_per_block, K, D], contiguous. Slot = block * tokens_per_block + offset.
- out [T, H, D], contiguous.
- block tables [B, M] int32, columns contiguous; query_start [B + 1], context lengths [B] int32; slots [T] int64.
- partial results of split keys, float32: see `Shares`.

query, key, value, cache and out have one dtype: float16, bfloat16 or float32. Scores, softmax and sums are float32;
products of matrices do not use TF32.

| kernel | grid | one program computes |
| --- | --- | --- |
| `_store` | T | one token's key and value, copied to its slot |
| `_attend` | tiles of query rows, K * shares, sequences | a tile of query rows of one KV head over one share of keys |
| `_attend`, captured steps with context | tiles of all sequences, K | the same; `_locate` finds the tile's sequence |
| `_combine` | generation rows * H | one query head of one token, from its shares |

A query row is a (token, query head) pair: the GROUP query heads of a KV head are adjacent rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs
from engine_worker.attention.cache import LayerCache
from engine_worker.attention.split import CAPTURED_ROWS, LONG, SPLITS, UNSPLIT, USUAL, Split, plan_split

TILE_BYTES = 1 << 15
"""Bytes of a tile of query rows, and of the keys and values that a program reads per iteration. With two iterations in
flight this fits the shared memory of every supported GPU."""
ROOMY = (9, 10)
"""Major compute capabilities with 227 KiB of shared memory per program. There, programs for context read twice as many
keys per iteration, which took 10 % less time on an H100."""
STAGES = 3
"""Pipeline stages. With 2, Triton does not prefetch loads whose results are addresses of other loads: the block table
entries. 3 takes no more shared memory."""
GENERATION_WARPS, CONTEXT_WARPS = 4, 8
CHUNK = 16
"""Shares that `_combine` reads per iteration."""


class Shares(NamedTuple):
    """Partial results of programs that each attended to a share of a sequence's keys."""

    split: Split
    sums: Tensor
    """[rows, heads, max_shares, head_dim] float32: sum of the values weighted by exp(score - top), not normalized."""
    tops: Tensor
    """[rows, heads, max_shares] float32: highest score of the share; -inf if it has no keys."""
    totals: Tensor
    """[rows, heads, max_shares] float32: sum of the weights."""

    @classmethod
    def of(cls, split: Split, query: Tensor, rows: int) -> "Shares":
        shape = (rows, query.shape[1], split.max_shares)
        sums, tops, totals = (
            query.new_empty(size, dtype=torch.float32) for size in ((*shape, query.shape[2]), shape, shape)
        )
        return cls(split, sums, tops, totals)


@triton.jit
def _store(key, value, keys, values, slots, key_stride, value_stride, size, WIDTH: tl.constexpr):
    """Copies `size` = K * D elements of one token's key, and of its value, to its slot. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, WIDTH)
        inside = at < size
        tl.store(keys + slot * size + at, tl.load(key + token * key_stride + at, mask=inside), mask=inside)
        tl.store(values + slot * size + at, tl.load(value + token * value_stride + at, mask=inside), mask=inside)


def store(cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `engine_worker.attention.paged.Store`."""
    key, value = _rows(key), _rows(value)
    size = key.shape[1]
    width = triton.next_power_of_2(size)
    strides = key.stride(0), value.stride(0)
    _store[(len(slots),)](key, value, cache.keys, cache.values, slots, *strides, size, WIDTH=width)


@triton.jit
def _leads(sequence, begin, end):
    """Whether the sequence with tokens [begin, end) is a generation row: it and all before it have one token each."""
    return (begin == sequence) & (end == sequence + 1)


@triton.jit
def _locate(query_start, batch, place, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Finds the tile at index `place` among the tiles of all sequences that are not generation rows -> (its sequence,
    its index in the sequence, whether there is such a tile). At most WIDTH sequences."""
    at = tl.arange(0, WIDTH)
    begin = tl.load(query_start + at, mask=at < batch, other=0)
    end = tl.load(query_start + at + 1, mask=at < batch, other=0)
    tiles = tl.where(_leads(at, begin, end), 0, tl.cdiv((end - begin) * GROUP, ROWS))
    tiles_end = tl.cumsum(tiles, 0)
    sequence = tl.sum((tiles_end <= place).to(tl.int32), 0)
    tile = place - tl.sum(tl.where(at == sequence, tiles_end - tiles, 0), 0)
    return tl.minimum(sequence, batch - 1), tile, sequence < batch


@triton.jit(do_not_specialize=["table_stride", "skipped", "batch", "max_shares", "min_shares", "window"])
def _attend(
    query, keys, values, out, sums, tops, totals, tables, query_start, lengths, scale, query_stride, table_stride,
    skipped, batch, max_shares, min_shares, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LONG: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
    GENERATION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attends ROWS query rows of one KV head to one share of a sequence's keys. Writes the output, or partial results
    for `_combine` if SPLIT.

    Grid: (tiles of query rows, KV heads * max_shares, sequences from `skipped` on). If WIDTH is not 0, there is no
    third dimension, and the first counts the tiles of all sequences: the numbers of tokens were not known on the host
    when the graph was captured.

    GENERATION: compute only generation rows; otherwise only the other sequences (the host passes only these, or
    `_locate` skips generation rows). DIMS: head_dim rounded up to a power of two. PAGE: tokens per block. KEYS: keys
    per iteration. `max_shares` and `min_shares`: see `Split`.
    """
    tile, sequence, active = tl.program_id(0), skipped + tl.program_id(2), True
    if WIDTH > 0:
        sequence, tile, active = _locate(query_start, batch, tile, GROUP, ROWS, WIDTH)
    head, split = tl.program_id(1) // max_shares, tl.program_id(1) % max_shares
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    past = tl.load(lengths + sequence) - count
    if GENERATION:
        active = _leads(sequence, begin, begin + count)
    elif WIDTH == 0:
        # The grid has tiles for the longest query: in shorter sequences some programs have no rows.
        active = tile * ROWS < count * GROUP
    if active:
        # All query heads of a KV head share a tile, so that keys and values are read once for all of them.
        row = tile * ROWS + tl.arange(0, ROWS)
        token = row // GROUP
        live = token < count
        position = past + token
        at = tl.arange(0, DIMS)
        inside = live[:, None] & (at < HEAD_DIM)[None, :]
        query_head = head * GROUP + row % GROUP
        place = (begin + token).to(tl.int64) * query_stride + query_head * HEAD_DIM
        rows = tl.load(query + place[:, None] + at[None, :], mask=inside, other=0.0)

        # Keys that any row of the tile sees: [first, end), divided into shares that are a multiple of KEYS.
        end = past + tl.minimum(count, (tile * ROWS + ROWS - 1) // GROUP + 1)
        first = 0
        if WINDOWED:
            first = tl.maximum(0, past + tile * ROWS // GROUP - window + 1)
        tiles = tl.cdiv(end - first, KEYS)
        share = tl.maximum(tl.cdiv(tiles, max_shares), tl.minimum(tl.cdiv(tiles, min_shares), LONG // KEYS)) * KEYS
        low = first + split * share
        high = tl.minimum(end, low + share)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, DIMS], tl.float32)
        for start in range(low, high, KEYS):
            key = start + tl.arange(0, KEYS)
            in_share = key < high
            block = tl.load(tables + sequence * table_stride + key // PAGE, mask=in_share, other=0).to(tl.int64)
            slot = ((block * PAGE + key % PAGE) * KV_HEADS + head) * HEAD_DIM
            loaded = in_share[:, None] & (at < HEAD_DIM)[None, :]
            columns = tl.load(keys + slot[:, None] + at[None, :], mask=loaded, other=0.0)
            scores = tl.dot(rows, tl.trans(columns), input_precision="ieee") * scale
            seen = (key[None, :] <= position[:, None]) & in_share[None, :]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen no key yet has top -inf, and -inf - -inf would be NaN: subtract 0 instead.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(scores - base[:, None])
            # Rescale what was accumulated under the previous maximum.
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weights, 1)
            content = tl.load(values + slot[:, None] + at[None, :], mask=loaded, other=0.0)
            products = tl.dot(weights.to(content.dtype), content, input_precision="ieee")
            weighted = weighted * shrink[:, None] + products
            top = new_top

        target = (begin + token).to(tl.int64) * (GROUP * KV_HEADS) + query_head
        if SPLIT:
            # A share without keys writes no sums: _combine does not read them.
            target = target * max_shares + split
            tl.store(tops + target, top, mask=live)
            tl.store(totals + target, total, mask=live)
            tl.store(sums + target[:, None] * HEAD_DIM + at[None, :], weighted, mask=inside & (low < high))
        else:
            mean = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + target[:, None] * HEAD_DIM + at[None, :], mean.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["max_shares"])
def _combine(
    sums, tops, totals, out, query_start, max_shares,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Merges the shares of one generation row and query head. Grid: (rows * HEADS,). CHECKED: the rows may include
    sequences that are not generation rows, whose output must not be overwritten. SPLITS: at least `max_shares`, a
    power of two."""
    pair = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = at < HEAD_DIM
    top = tl.load(tops + pair * max_shares + split, mask=split < max_shares, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(
        tl.load(totals + pair * max_shares + split, mask=split < max_shares, other=0.0) * tl.exp(top - base), 0
    )
    weighted = tl.zeros([DIMS], tl.float32)
    for start in range(0, max_shares, CHUNK):
        part = start + tl.arange(0, CHUNK)
        weights = tl.exp(tl.load(tops + pair * max_shares + part, mask=part < max_shares, other=float("-inf")) - base)
        # A share without keys has weight 0 and has written no sums.
        written = (weights > 0.0)[:, None] & inside[None, :]
        partial = tl.load(sums + (pair * max_shares + part)[:, None] * HEAD_DIM + at[None, :], mask=written, other=0.0)
        weighted += tl.sum(partial * weights[:, None], 0)
    mean = weighted / tl.where(total == 0.0, 1.0, total)
    if CHECKED:
        row = pair // HEADS
        inside = inside & _leads(row, tl.load(query_start + row), tl.load(query_start + row + 1))
    tl.store(out + pair * HEAD_DIM + at, mean.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, cache: LayerCache, inputs: AttentionInputs, scale: float, window: int | None) -> Tensor:
    """See `engine_worker.attention.paged.Attend`."""
    # Generation rows have a separate launch, also in steps with context: their tiles have few rows, and their keys may
    # be split.
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_generation, batch = inputs.generation_rows, len(inputs.context_lengths)
    generation, context, planned_rows = range(num_generation), range(num_generation, batch), num_generation
    if inputs.captured_context:
        # Which sequences are generation rows is known on the device only: both launches cover all of them.
        generation = context = range(batch)
        planned_rows = min(batch, USUAL)
    if generation:
        longest = min(inputs.max_context, window or inputs.max_context)
        split = plan_split(planned_rows * cache.keys.shape[2], longest, _keys_per_round(query), _cores(query.device))
        shares = None if split == UNSPLIT else Shares.of(split, query, len(generation))
        _launch(query, cache, inputs, scale, window, out, generation, 1, shares)
        if shares is not None:
            _launch_combine(shares, out, inputs)
    if context:
        _launch(query, cache, inputs, scale, window, out, context, inputs.max_query, None)
    return out


def _launch(
    query: Tensor,
    cache: LayerCache,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    out: Tensor,
    sequences: range,
    longest: int,
    shares: Shares | None,
) -> None:
    """Launch `_attend` for these sequences, which have at most `longest` query tokens each; if `longest` is 1, only for
    the generation rows among them."""
    page, kv_heads, head_dim = cache.keys.shape[1:]
    group = query.shape[1] // kv_heads
    rows = max(16, triton.next_power_of_2(group) if longest == 1 else min(128, _vectors_per_tile(query)))
    keys = _keys_per_round(query) if longest == 1 or not _is_roomy(query.device) else min(128, _vectors_per_tile(query))
    split, *partial_results = shares or (UNSPLIT, out, out, out)
    rows_of_query = _rows(query)
    grid = triton.cdiv(longest * group, rows), kv_heads * split.max_shares, len(sequences)
    flat = inputs.captured_context and longest > 1
    if flat:
        # Each sequence may end with a partly filled tile: at most len(sequences) tiles more than the query rows fill.
        grid = grid[0] + len(sequences), kv_heads, 1
    _attend[grid](
        rows_of_query, cache.keys, cache.values, out, *partial_results, inputs.block_tables, inputs.query_start,
        inputs.context_lengths, scale, rows_of_query.stride(0), inputs.block_tables.stride(0),
        sequences.start, len(sequences), split.max_shares, split.min_shares, window or 0,
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=_dims(head_dim), PAGE=page,
        ROWS=rows, KEYS=keys, LONG=LONG, SPLIT=shares is not None, WINDOWED=window is not None,
        GENERATION=longest == 1, WIDTH=CAPTURED_ROWS if flat else 0,
        num_stages=STAGES, num_warps=GENERATION_WARPS if longest == 1 else CONTEXT_WARPS,
    )  # fmt: skip


def _launch_combine(shares: Shares, out: Tensor, inputs: AttentionInputs) -> None:
    rows, num_heads, max_shares, head_dim = shares.sums.shape
    _combine[(rows * num_heads,)](
        shares.sums, shares.tops, shares.totals, out, inputs.query_start, max_shares,
        HEADS=num_heads, HEAD_DIM=head_dim, DIMS=_dims(head_dim), SPLITS=SPLITS, CHUNK=CHUNK,
        CHECKED=inputs.captured_context,
    )  # fmt: skip


def _dims(head_dim: int) -> int:
    """head_dim rounded up to what a tile can have: a power of two, and at least 16 for tl.dot."""
    return max(16, triton.next_power_of_2(head_dim))


def _vectors_per_tile(query: Tensor) -> int:
    """Number of vectors of head_dim that fit in TILE_BYTES."""
    return TILE_BYTES // (_dims(query.shape[2]) * query.itemsize)


def _keys_per_round(query: Tensor) -> int:
    """Keys that a program reads per iteration."""
    return max(16, min(64, _vectors_per_tile(query) // 2))


def _cores(device: torch.device) -> int:
    """Number of multiprocessors; an arbitrary number on a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 32


def _is_roomy(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in ROOMY


def _rows(heads: Tensor) -> Tensor:
    """[T, heads, head_dim] -> [T, heads * head_dim], copied only if the heads of a token are not contiguous."""
    contiguous = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return (heads if contiguous else heads.contiguous()).flatten(1)

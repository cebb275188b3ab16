"""Sluice's attention kernels in Triton. Imports triton, so it is imported only when they are wanted."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs
from engine_worker.attention.cache import LayerCache
from engine_worker.attention.split import CAPTURED_ROWS, LONG, SPLITS, UNSPLIT, USUAL, Split, plan_split

TILE_BYTES = 1 << 15
"""Bytes of query rows, and of keys and values together, in one round of a program. With two rounds in flight that fits
the shared memory of every supported GPU."""
ROOMY = (9, 10)
"""Major compute capabilities whose programs may have 227 KiB of it: with context they read twice as many keys a round,
which took 10 % less time on an H100."""
STAGES = 3
"""Pipeline stages. With 2, Triton does not prefetch loads that others depend on: the block table entries. 3 takes no
more shared memory."""
GENERATION_WARPS, CONTEXT_WARPS = 4, 8
CHUNK = 16
"""Shares combined per iteration."""


class Shares(NamedTuple):
    """Partial results of programs that each attended to a share of a sequence's keys."""

    split: Split
    sums: Tensor
    """[rows, heads, most, head_dim] float32: weighted sum of the values, not normalized."""
    tops: Tensor
    totals: Tensor
    """Each [rows, heads, most] float32: the highest score, and the sum of the weights."""

    @classmethod
    def of(cls, split: Split, query: Tensor, rows: int) -> "Shares":
        shape = (rows, query.shape[1], split.most)
        sums, tops, totals = (
            query.new_empty(size, dtype=torch.float32) for size in ((*shape, query.shape[2]), shape, shape)
        )
        return cls(split, sums, tops, totals)


@triton.jit
def _store(key, value, keys, values, slots, key_stride, value_stride, size, WIDTH: tl.constexpr):
    """One token per program: `size` elements of its key and of its value go to its slot."""
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
    """Whether a sequence with these tokens is a generation row, of one token like all before it."""
    return (begin == sequence) & (end == sequence + 1)


@triton.jit
def _locate(query_start, batch, place, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The tiles of query rows of all sequences but generation rows, one after the other: sequence of the tile at this
    place, its number in the sequence, and whether there is one. Up to WIDTH sequences."""
    at = tl.arange(0, WIDTH)
    begin = tl.load(query_start + at, mask=at < batch, other=0)
    end = tl.load(query_start + at + 1, mask=at < batch, other=0)
    tiles = tl.where(_leads(at, begin, end), 0, tl.cdiv((end - begin) * GROUP, ROWS))
    behind = tl.cumsum(tiles, 0)
    sequence = tl.sum((behind <= place).to(tl.int32), 0)
    tile = place - tl.sum(tl.where(at == sequence, behind - tiles, 0), 0)
    return tl.minimum(sequence, batch - 1), tile, sequence < batch


@triton.jit(do_not_specialize=["table_stride", "skipped", "batch", "most", "busy", "window"])
def _attend(
    query, keys, values, out, sums, tops, totals, tables, query_start, lengths, scale, query_stride, table_stride,
    skipped, batch, most, busy, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LONG: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
    GENERATION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One KV head, one share of a sequence's keys, and ROWS (query token, query head of the KV head) pairs per program.

    GENERATION: of leading sequences with one token each; else of all others. WIDTH: if not 0, the host that captures a
    graph knows neither which sequences these are nor how many tokens they have; see `_locate`. Online softmax
    (arXiv:1805.02867). Writes the output or, if keys are split, partial results for `_combine`.
    """
    # Grid: tiles of query rows; KV heads times shares; sequences, but for WIDTH.
    tile, sequence, mine = tl.program_id(0), skipped + tl.program_id(2), True
    if WIDTH > 0:
        sequence, tile, mine = _locate(query_start, batch, tile, GROUP, ROWS, WIDTH)
    head, split = tl.program_id(1) // most, tl.program_id(1) % most
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    past = tl.load(lengths + sequence) - count
    if GENERATION:
        mine = _leads(sequence, begin, begin + count)
    elif WIDTH == 0:
        # Sequences are padded to the longest query: shorter ones leave programs without rows.
        mine = tile * ROWS < count * GROUP
    if mine:
        # All query heads of a KV head share a tile, so that its keys and values are read once.
        row = tile * ROWS + tl.arange(0, ROWS)
        token = row // GROUP
        live = token < count
        position = past + token
        at = tl.arange(0, DIMS)
        inside = live[:, None] & (at < HEAD_DIM)[None, :]
        query_head = head * GROUP + row % GROUP
        place = (begin + token).to(tl.int64) * query_stride + query_head * HEAD_DIM
        rows = tl.load(query + place[:, None] + at[None, :], mask=inside, other=0.0)

        # Keys that any row of the tile sees: [first, end), divided into shares of whole rounds.
        end = past + tl.minimum(count, (tile * ROWS + ROWS - 1) // GROUP + 1)
        first = 0
        if WINDOWED:
            first = tl.maximum(0, past + tile * ROWS // GROUP - window + 1)
        tiles = tl.cdiv(end - first, KEYS)
        share = tl.maximum(tl.cdiv(tiles, most), tl.minimum(tl.cdiv(tiles, busy), LONG // KEYS)) * KEYS
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
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen no key yet has top -inf, and -inf - -inf would be NaN: subtract 0 instead.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - base[:, None])
            # Rescale what was accumulated under the former maximum.
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weights, 1)
            content = tl.load(values + slot[:, None] + at[None, :], mask=wanted, other=0.0)
            found = tl.dot(weights.to(content.dtype), content, input_precision="ieee")
            weighted = weighted * shrink[:, None] + found
            top = higher

        target = (begin + token).to(tl.int64) * (GROUP * KV_HEADS) + query_head
        if SPLIT:
            # A share without keys writes no sums; _combine does not read them.
            target = target * most + split
            tl.store(tops + target, top, mask=live)
            tl.store(totals + target, total, mask=live)
            tl.store(sums + target[:, None] * HEAD_DIM + at[None, :], weighted, mask=inside & (low < high))
        else:
            mean = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + target[:, None] * HEAD_DIM + at[None, :], mean.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["most"])
def _combine(
    sums, tops, totals, out, query_start, most,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Merges the shares of one query token and head per program. CHECKED: only of generation rows."""
    pair = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    inside = at < HEAD_DIM
    top = tl.load(tops + pair * most + split, mask=split < most, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(totals + pair * most + split, mask=split < most, other=0.0) * tl.exp(top - base), 0)
    weighted = tl.zeros([DIMS], tl.float32)
    for start in range(0, most, CHUNK):
        part = start + tl.arange(0, CHUNK)
        weights = tl.exp(tl.load(tops + pair * most + part, mask=part < most, other=float("-inf")) - base)
        # A share without keys has weight 0 and has written no sums.
        there = (weights > 0.0)[:, None] & inside[None, :]
        found = tl.load(sums + (pair * most + part)[:, None] * HEAD_DIM + at[None, :], mask=there, other=0.0)
        weighted += tl.sum(found * weights[:, None], 0)
    mean = weighted / tl.where(total == 0.0, 1.0, total)
    if CHECKED:
        row = pair // HEADS
        inside = inside & _leads(row, tl.load(query_start + row), tl.load(query_start + row + 1))
    tl.store(out + pair * HEAD_DIM + at, mean.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, cache: LayerCache, inputs: AttentionInputs, scale: float, window: int | None) -> Tensor:
    """See `engine_worker.attention.paged.Attend`."""
    # Leading generation rows get a launch of their own, in steps with context too: their tiles have few rows, and their
    # keys are split if that pays.
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    single, batch = inputs.generation_rows, len(inputs.context_lengths)
    leading, others, usual = range(single), range(single, batch), single
    if inputs.captured_context:
        leading = others = range(batch)
        usual = min(batch, USUAL)
    if leading:
        longest = min(inputs.max_context, window or inputs.max_context)
        split = plan_split(usual * cache.keys.shape[2], longest, _keys_per_round(query), _cores(query.device))
        shares = None if split == UNSPLIT else Shares.of(split, query, len(leading))
        _launch(query, cache, inputs, scale, window, out, leading, 1, shares)
        if shares is not None:
            _launch_combine(shares, out, inputs)
    if others:
        _launch(query, cache, inputs, scale, window, out, others, inputs.max_query, None)
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
    """For these sequences, of at most `longest` query tokens each; 1: for the generation rows among them."""
    page, kv_heads, head_dim = cache.keys.shape[1:]
    group = query.shape[1] // kv_heads
    rows = max(16, triton.next_power_of_2(group) if longest == 1 else min(128, _vectors_per_tile(query)))
    keys = _keys_per_round(query) if longest == 1 or not _is_roomy(query.device) else min(128, _vectors_per_tile(query))
    split, *found = shares or (UNSPLIT, out, out, out)
    rows_of_query = _rows(query)
    grid = triton.cdiv(longest * group, rows), kv_heads * split.most, len(sequences)
    flat = inputs.captured_context and longest > 1
    if flat:
        # Each sequence but the last may leave a tile partly filled.
        grid = grid[0] + len(sequences), kv_heads, 1
    _attend[grid](
        rows_of_query, cache.keys, cache.values, out, *found, inputs.block_tables, inputs.query_start,
        inputs.context_lengths, scale, rows_of_query.stride(0), inputs.block_tables.stride(0),
        sequences.start, len(sequences), split.most, split.busy, window or 0,
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=_dims(head_dim), PAGE=page,
        ROWS=rows, KEYS=keys, LONG=LONG, SPLIT=shares is not None, WINDOWED=window is not None,
        GENERATION=longest == 1, WIDTH=CAPTURED_ROWS if flat else 0,
        num_stages=STAGES, num_warps=GENERATION_WARPS if longest == 1 else CONTEXT_WARPS,
    )  # fmt: skip


def _launch_combine(shares: Shares, out: Tensor, inputs: AttentionInputs) -> None:
    rows, num_heads, most, head_dim = shares.sums.shape
    _combine[(rows * num_heads,)](
        shares.sums, shares.tops, shares.totals, out, inputs.query_start, most,
        HEADS=num_heads, HEAD_DIM=head_dim, DIMS=_dims(head_dim), SPLITS=SPLITS, CHUNK=CHUNK,
        CHECKED=inputs.captured_context,
    )  # fmt: skip


def _dims(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _vectors_per_tile(query: Tensor) -> int:
    """Vectors of head_dim that fit TILE_BYTES."""
    return TILE_BYTES // (_dims(query.shape[2]) * query.itemsize)


def _keys_per_round(query: Tensor) -> int:
    return max(16, min(64, _vectors_per_tile(query) // 2))


def _cores(device: torch.device) -> int:
    """Multiprocessors; an arbitrary number on a CPU, where Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 32


def _is_roomy(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in ROOMY


def _rows(heads: Tensor) -> Tensor:
    """[T, heads, head_dim] -> [T, heads * head_dim], copied only if the heads are not contiguous."""
    together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return (heads if together else heads.contiguous()).flatten(1)

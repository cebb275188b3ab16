"""Triton implementations of `CodedKernels`. This module imports triton, so import it only where the kernels are used.

T tokens, K inputs, N outputs, S tokens sorted by expert. x and out have the model's dtype: float16, bfloat16 or
float32. A weight is decoded in float32, by the same operations as `Stored.decode`, and rounded to that dtype; sums are
float32.

| kernel | inputs | output | grid |
| --- | --- | --- | --- |
| `_single` | x [1, K] | [1, N] | N / ROWS |
| `_product` | x [T, K] | [T, N] | N / ROWS, T / TOKENS |
| `_decode` | rows [R] or all | [R, K] | R / ROWS, bytes of a row / RUN |
| `_grouped` | x [S, K], ends [experts] | [S, N] | N / ROWS, tiles of TOKENS rows of one expert |

Quotients are rounded up. `codes`, `scales` and `zeros` are those of `Coded`: all columns of a run have one scale, so a
tile of RUN columns needs one scale per row.

Costs: a weight takes about ten operations to decode, so an H100, which reads 6.7e12 4-bit codes a second and computes
3e13 operations, may be limited by arithmetic at 4 bits: measure first (`python -m bench.gpu coded`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.layers.coded import Coded, CodedExperts, CodedKernels

SPAN = 512
"""Bytes of a row that a program of `_single` reads at a time."""
TILES = {16: (32, 4, 4), 32: (32, 4, 4), 64: (64, 4, 3), 128: (64, 4, 2)}
"""Tokens of a tile -> its outputs, warps and stages. With more stages the largest does not fit the shared memory of
small GPUs."""
WIDEST = {2: 128, 4: 32}
"""Most tokens of a tile, by the bytes of a number."""
DECODED = 32
"""Rows of a tile of `_decode`."""


@triton.jit
def _weights(raw, scale, zero, table, TYPE: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [.., RUN] int32 -> weights. scale, zero: of their shape, or to be repeated."""
    if TYPE == "i4":
        values = ((raw ^ 8) - 8).to(tl.float32)
    elif TYPE == "i8":
        values = ((raw ^ 128) - 128).to(tl.float32)
    elif TYPE == "nf4":
        values = tl.load(table + raw)
    elif TYPE == "f4e2m1":
        # Twice the number: 0 and 1, then mantissas of 2 and 3 times a power of two.
        size = raw & 7
        size = tl.where(size < 2, size, ((2 + (size & 1)) << (size >> 1)) >> 1)
        values = tl.where((raw & 8) != 0, -size, size).to(tl.float32) * 0.5
    elif TYPE == "f8e4m3":
        # The bits of a float16 with a larger bias of its exponent, 15 instead of 7. NaN is no weight.
        bits = ((raw & 127) << 7) | ((raw & 128) << 8)
        values = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        values = raw.to(tl.float32)
    if ZEROS:
        values = values - zero
    return (values * scale).to(DTYPE)


@triton.jit
def _numbers(numbers, row, column, groups, inside, GROUP: tl.constexpr):
    """The scales or zeros of some rows in the group of a column. Columns past the last have any."""
    at = row * groups
    if GROUP:
        at += tl.minimum(column // GROUP, groups - 1)
    return tl.load(numbers + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def _tile(raw, column, row, inside, scales, zeros, table, groups, TYPE, ZEROS, GROUP, DTYPE):
    """The weights of rows in a run of columns that begins with `column`: [ROWS, RUN]."""
    scale = _numbers(scales, row, column, groups, inside, GROUP)
    zero = scale
    if ZEROS:
        zero = _numbers(zeros, row, column, groups, inside, GROUP)
    return _weights(raw, scale, zero, table, TYPE, ZEROS, DTYPE)


@triton.jit
def _columns(x, token, column, order, inputs, present, ORDERED: tl.constexpr):
    """[RUN, TOKENS]: some columns of each token."""
    inside = column < inputs
    if ORDERED:
        column = tl.load(order + column, mask=inside, other=0)
    mask = present[None, :] & inside[:, None]
    return tl.load(x + token[None, :] * inputs + column[:, None], mask=mask, other=0.0)


@triton.jit
def _sums(
    x, codes, scales, zeros, table, order, row, kept, token, present, inputs, width, groups,
    TYPE: tl.constexpr, PAIRED: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """W xᵀ of some rows and tokens: [ROWS, TOKENS] float32. The weights, decoded in registers, are the left operand."""
    lane = tl.arange(0, RUN)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, width, RUN):
        raw = tl.load(codes + row[:, None] * width + (start + lane)[None, :], mask=kept[:, None], other=0).to(tl.int32)
        if PAIRED:
            first = 2 * start
            weights = _tile(
                raw & 15, first, row[:, None], kept[:, None], scales, zeros, table, groups,
                TYPE, ZEROS, GROUP, x.dtype.element_ty,
            )  # fmt: skip
            values = _columns(x, token, first + lane, order, inputs, present, ORDERED)
            total = tl.dot(weights, values, total, input_precision="ieee")
            raw, first = raw >> 4, first + RUN
        else:
            first = start
        weights = _tile(
            raw, first, row[:, None], kept[:, None], scales, zeros, table, groups,
            TYPE, ZEROS, GROUP, x.dtype.element_ty,
        )  # fmt: skip
        values = _columns(x, token, first + lane, order, inputs, present, ORDERED)
        total = tl.dot(weights, values, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens", "outputs", "groups"])
def _product(
    x, codes, scales, zeros, table, bias, out, tokens, outputs, inputs, width, groups,
    TYPE: tl.constexpr, PAIRED: tl.constexpr, ZEROS: tl.constexpr, BIASED: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of TOKENS tokens per program: W xᵀ + b."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept, row = row < outputs, row.to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    present, token = token < tokens, token.to(tl.int64)
    total = _sums(
        x, codes, scales, zeros, table, codes, row, kept, token, present, inputs, width, groups,
        TYPE, PAIRED, ZEROS, False, GROUP, RUN, ROWS, TOKENS,
    )  # fmt: skip
    if BIASED:
        total += tl.load(bias + row, mask=kept, other=0.0).to(tl.float32)[:, None]
    where = out + token[None, :] * outputs + row[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=kept[:, None] & present[None, :])


@triton.jit(do_not_specialize=["experts", "outputs", "groups"])
def _grouped(
    x, ends, codes, scales, zeros, table, order, out, experts, outputs, inputs, width, groups,
    TYPE: tl.constexpr, PAIRED: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of up to TOKENS tokens of one expert per program. Each program finds its expert in `ends`, since the
    host does not know them. `outputs`: of one expert. EXPERTS: `experts` rounded up to a power of two."""
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < experts, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = (end - start + TOKENS - 1) // TOKENS
    reached = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum((reached <= tile).to(tl.int32), 0)
    if expert >= experts:
        # The grid is for as many tiles as there may be.
        return
    mine = number == expert
    first = tl.sum(tl.where(mine, start + (tile - reached + tiles) * TOKENS, 0), 0)
    token = first + tl.arange(0, TOKENS)
    present, token = token < tl.sum(tl.where(mine, end, 0), 0), token.to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept, expert = row < outputs, expert.to(tl.int64)
    total = _sums(
        x, codes, scales, zeros, table, order + expert * inputs, expert * outputs + row, kept, token, present,
        inputs, width, groups, TYPE, PAIRED, ZEROS, ORDERED, GROUP, RUN, ROWS, TOKENS,
    )  # fmt: skip
    where = out + token[None, :] * outputs + row[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=kept[:, None] & present[None, :])


@triton.jit(do_not_specialize=["outputs", "groups"])
def _single(
    x, codes, scales, zeros, table, bias, out, outputs, inputs, width, groups,
    TYPE: tl.constexpr, PAIRED: tl.constexpr, ZEROS: tl.constexpr, BIASED: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of the only token per program. A tile is [ROWS, RUNS, RUN]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    kept, row = row < outputs, row.to(tl.int64)
    run = tl.arange(0, RUNS)[None, :, None] * RUN
    lane = tl.arange(0, RUN)[None, None, :]
    total = tl.zeros((ROWS, RUNS, RUN), tl.float32)
    for start in range(0, width, RUNS * RUN):
        begin = start + run
        # Each code is read once per step: do not let it displace other data from the cache.
        raw = tl.load(
            codes + row * width + (begin + lane), mask=kept & (begin < width), other=0, eviction_policy="evict_first"
        ).to(tl.int32)
        if PAIRED:
            first = 2 * begin
            weights = _tile(
                raw & 15, first, row, kept, scales, zeros, table, groups, TYPE, ZEROS, GROUP, x.dtype.element_ty
            )
            values = tl.load(x + first + lane, mask=first + lane < inputs, other=0.0)
            total += weights.to(tl.float32) * values.to(tl.float32)
            raw, first = raw >> 4, first + RUN
        else:
            first = begin
        weights = _tile(raw, first, row, kept, scales, zeros, table, groups, TYPE, ZEROS, GROUP, x.dtype.element_ty)
        values = tl.load(x + first + lane, mask=first + lane < inputs, other=0.0)
        total += weights.to(tl.float32) * values.to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.sum(tl.sum(total, 2), 1)
    if BIASED:
        sums += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    tl.store(out + row, sums.to(out.dtype.element_ty), mask=row < outputs)


@triton.jit(do_not_specialize=["count", "groups"])
def _decode(
    codes, scales, zeros, table, chosen, out, count, inputs, width, groups,
    TYPE: tl.constexpr, PAIRED: tl.constexpr, ZEROS: tl.constexpr, CHOSEN: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A run of bytes of ROWS rows per program."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept, place = place < count, place.to(tl.int64)
    row = place
    if CHOSEN:
        row = tl.load(chosen + place, mask=kept, other=0)
    start = tl.program_id(1) * RUN
    lane = tl.arange(0, RUN)
    raw = tl.load(codes + row[:, None] * width + (start + lane)[None, :], mask=kept[:, None], other=0).to(tl.int32)
    first = start
    where = out + place[:, None] * inputs
    if PAIRED:
        first = 2 * start
        weights = _tile(
            raw & 15, first, row[:, None], kept[:, None], scales, zeros, table, groups,
            TYPE, ZEROS, GROUP, out.dtype.element_ty,
        )  # fmt: skip
        column = first + lane
        tl.store(where + column[None, :], weights, mask=kept[:, None] & (column < inputs)[None, :])
        raw, first = raw >> 4, first + RUN
    weights = _tile(
        raw, first, row[:, None], kept[:, None], scales, zeros, table, groups, TYPE, ZEROS, GROUP, out.dtype.element_ty
    )
    column = first + lane
    tl.store(where + column[None, :], weights, mask=kept[:, None] & (column < inputs)[None, :])


def _flags(matrix: Coded) -> dict[str, object]:
    return {
        "TYPE": matrix.type,
        "PAIRED": matrix.paired,
        "ZEROS": matrix.zeros is not None,
        "GROUP": matrix.group,
        "RUN": matrix.run,
    }


def _arrays(matrix: Coded) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zeros and table; arrays that a matrix does not have are others, which are not read."""
    codes, scales, zeros, table = matrix.codes, matrix.scales, matrix.zeros, matrix.table
    return codes, scales, scales if zeros is None else zeros, scales if table is None else table


def _tile_for(tokens: int, x: Tensor) -> int:
    return min(WIDEST[x.itemsize], max(16, triton.next_power_of_2(tokens)))


def product(x: Tensor, matrix: Coded, bias: Tensor | None) -> Tensor:
    (tokens, inputs), (outputs, width) = x.shape, matrix.codes.shape
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    arrays = *_arrays(matrix), out if bias is None else bias, out
    flags = _flags(matrix) | {"BIASED": bias is not None}
    groups = matrix.scales.shape[1]
    if tokens == 1:
        runs = SPAN // matrix.run
        _single[(triton.cdiv(outputs, 4),)](x, *arrays, outputs, inputs, width, groups, **flags, RUNS=runs, ROWS=4)
        return out
    tile = _tile_for(tokens, x)
    rows, warps, stages = TILES[tile]
    _product[(triton.cdiv(outputs, rows), triton.cdiv(tokens, tile))](
        x, *arrays, tokens, outputs, inputs, width, groups, **flags, ROWS=rows, TOKENS=tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def decode(matrix: Coded, rows: Tensor | None, out: Tensor) -> None:
    count, inputs = out.shape
    width = matrix.codes.shape[1]
    _decode[(triton.cdiv(count, DECODED), width // matrix.run)](
        *_arrays(matrix), out if rows is None else rows, out, count, inputs, width, matrix.scales.shape[1],
        **_flags(matrix), CHOSEN=rows is not None, ROWS=DECODED,
    )  # fmt: skip


def grouped(x: Tensor, ends: Tensor, experts: CodedExperts) -> Tensor:
    (tokens, inputs), matrix, outputs = x.shape, experts.matrix, experts.outputs
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    tile = _tile_for(triton.cdiv(tokens, experts.count), x)
    rows, warps, stages = TILES[tile]
    # The most if all experts, or as many as there are tokens, have some.
    tiles = (tokens + min(tokens, experts.count) * (tile - 1)) // tile
    arrays = *_arrays(matrix), ends if experts.order is None else experts.order, out
    _grouped[(triton.cdiv(outputs, rows), tiles)](
        x.contiguous(), ends, *arrays, experts.count, outputs, inputs, matrix.codes.shape[1], matrix.scales.shape[1],
        **_flags(matrix), ORDERED=experts.order is not None, EXPERTS=triton.next_power_of_2(experts.count),
        ROWS=rows, TOKENS=tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


KERNELS = CodedKernels(product, decode, grouped)

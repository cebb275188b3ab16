"""`GumbelMax` in Triton. Imports triton, so import this module only where Triton is installed.

Many GPUs compute float64 at 1/32 or 1/64 of the speed of float32. So a first pass computes the noise of the whole
vocabulary in float32, accurate to MARGIN, and a second pass recomputes in float64 only the few parts that may contain
the winner.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.sampling.noise import BITS, FACTORS, GOLDEN

WIDTH = 1 << 10
"""Tokens per part."""
NOISE = {"GOLDEN": GOLDEN, "FIRST": FACTORS[0], "SECOND": FACTORS[1], "BITS": BITS}
UNIT = 2.0**-BITS
MARGIN, RELATIVE = 1e-3, 1e-6
"""Bounds on the error of a float32 sum, absolute and relative to the highest: 1000 and 8 times its rounding error."""


@triton.jit
def random_bits(
    key, ids, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """The same integers as `noise.random_bits`."""
    x = (ids.to(tl.uint64) + 1) * GOLDEN + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return (x >> (64 - BITS)).to(tl.int64)


@triton.jit
def exponential(bits, BITS: tl.constexpr, UNIT: tl.constexpr):
    """-log(u) in float32 to a few units in the last place. For u near 1 it is computed from 1 - u by Kahan's formula
    for log1p, since rounding u itself to float32 would lose most of its digits."""
    low = (bits.to(tl.float32) + 0.5) * UNIT
    rest = (((1 << BITS) - 1 - bits).to(tl.float32) + 0.5) * UNIT
    near = 1.0 - rest
    high = tl.where(near == 1.0, rest, -tl.log(near) * rest / (1.0 - near))
    return tl.where(bits < (1 << (BITS - 1)), -tl.log(low), high)


@triton.jit
def _best(
    scores, temperatures, keys, thresholds, row, part, stride, size,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, LIMITED: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The maximum of one part of a row, and its token."""
    at = part * WIDTH + tl.arange(0, WIDTH)
    score = tl.load(scores + row * stride + at, mask=at < size, other=float("-inf"))
    scaled = tl.div_rn(score, tl.load(temperatures + row))
    bits = random_bits(tl.load(keys + row), at, GOLDEN, FIRST, SECOND, BITS)
    if EXACT:
        sums = scaled.to(tl.float64) - tl.log(-tl.log((bits.to(tl.float64) + 0.5) * UNIT))
    else:
        sums = scaled - tl.log(exponential(bits, BITS, UNIT))
    if LIMITED:
        sums = tl.where(scaled < tl.load(thresholds + row), float("-inf"), sums)
    # NaN must not win by being incomparable: its token may be past the end of the vocabulary.
    sums = tl.where(sums == sums, sums, float("-inf"))
    peak, column = tl.max(sums, 0, return_indices=True)
    return peak.to(tl.float64), (part * WIDTH + column).to(tl.int64)


@triton.jit(do_not_specialize=["stride", "size"])
def _coarse_max(
    scores, temperatures, keys, thresholds, peaks, tokens, stride, size,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, LIMITED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One part of a row per program, in float32."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, token = _best(
        scores, temperatures, keys, thresholds, row, part, stride, size,
        GOLDEN, FIRST, SECOND, BITS, UNIT, LIMITED, WIDTH, EXACT=False,
    )  # fmt: skip
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(tokens + place, token)


@triton.jit(do_not_specialize=["stride", "size", "count"])
def _exact_max(
    scores, temperatures, keys, thresholds, peaks, exact, tokens, stride, size, count,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, LIMITED: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    MARGIN: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """One part of a row per program, recomputed in float64 if its maximum may be the maximum of the row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * count + part
    others = tl.arange(0, PARTS)
    highest = tl.max(tl.load(peaks + row * count + others, mask=others < count, other=float("-inf")), 0)
    peak = tl.load(peaks + place)
    near = peak >= highest - MARGIN - RELATIVE * tl.abs(highest)
    # If the highest is infinite or NaN, this difference is NaN, and every part is recomputed.
    if near | (highest - highest != 0.0):
        peak, token = _best(
            scores, temperatures, keys, thresholds, row, part, stride, size,
            GOLDEN, FIRST, SECOND, BITS, UNIT, LIMITED, WIDTH, EXACT=True,
        )  # fmt: skip
        tl.store(tokens + place, token)
    tl.store(exact + place, peak)


def triton_gumbel_max(
    scores: Tensor, temperature: Tensor, keys: Tensor, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `GumbelMax`. Maxima of parts that cannot win are accurate to MARGIN only."""
    rows, size = scores.shape
    parts = triton.cdiv(size, WIDTH)
    peaks, exact = torch.empty((2, rows, parts), dtype=torch.float64, device=scores.device)
    tokens = torch.empty((rows, parts), dtype=torch.int64, device=scores.device)
    inputs = scores, temperature, keys, temperature if threshold is None else threshold
    options = {**NOISE, "UNIT": UNIT, "LIMITED": threshold is not None, "WIDTH": WIDTH}
    _coarse_max[(rows, parts)](*inputs, peaks, tokens, scores.stride(0), size, **options)
    _exact_max[(rows, parts)](
        *inputs, peaks, exact, tokens, scores.stride(0), size, parts,
        **options, PARTS=triton.next_power_of_2(parts), MARGIN=MARGIN, RELATIVE=RELATIVE,
    )  # fmt: skip
    return exact, tokens

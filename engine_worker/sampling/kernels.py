"""A Triton kernel of `race`; imports triton, and is itself imported where it is wanted."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.sampling.noise import BITS, FACTORS, GOLDEN

WIDTH = 1 << 10
"""Tokens of a part."""
NOISE = {"GOLDEN": GOLDEN, "FIRST": FACTORS[0], "SECOND": FACTORS[1], "BITS": BITS}
UNIT = 2.0**-BITS


@triton.jit
def random_bits(
    key, ids, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """See `noise.random_bits`, whose integers these are."""
    x = (ids.to(tl.uint64) + 1) * GOLDEN + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return (x >> (64 - BITS)).to(tl.int64)


@triton.jit(do_not_specialize=["stride", "size"])
def _race(
    scores, temperatures, keys, thresholds, peaks, tokens, stride, size,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, LIMITED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * WIDTH + tl.arange(0, WIDTH)
    score = tl.load(scores + row * stride + at, mask=at < size, other=float("-inf"))
    scaled = tl.div_rn(score, tl.load(temperatures + row))
    bits = random_bits(tl.load(keys + row), at, GOLDEN, FIRST, SECOND, BITS)
    uniform = (bits.to(tl.float64) + 0.5) * UNIT
    sums = scaled.to(tl.float64) - tl.log(-tl.log(uniform))
    if LIMITED:
        sums = tl.where(scaled < tl.load(thresholds + row), float("-inf"), sums)
    # What is no number must not win by being incomparable: a token past the last would.
    sums = tl.where(sums == sums, sums, float("-inf"))
    peak, column = tl.max(sums, 0, return_indices=True)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(tokens + place, (part * WIDTH + column).to(tl.int64))


def race(scores: Tensor, temperature: Tensor, keys: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
    """A `Race`, in one pass."""
    rows, size = scores.shape
    parts = triton.cdiv(size, WIDTH)
    peaks = torch.empty((rows, parts), dtype=torch.float64, device=scores.device)
    tokens = torch.empty((rows, parts), dtype=torch.int64, device=scores.device)
    limits = temperature if threshold is None else threshold
    _race[(rows, parts)](
        scores, temperature, keys, limits, peaks, tokens, scores.stride(0), size,
        **NOISE, UNIT=UNIT, LIMITED=threshold is not None, WIDTH=WIDTH,
    )  # fmt: skip
    return peaks, tokens

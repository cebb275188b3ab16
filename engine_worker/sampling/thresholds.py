"""`Thresholds` in Triton. Imports triton, so it is imported only when it is wanted.

One program per row searches for the lowest score that passes, by evaluating several pivots each time it reads the row.
Scores that are still undecided are collected on the way, so that after two or three times only few are left to read.
The search is in scores, not in scores over temperature: division is monotonic, so both searches end at the same token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.sampling.filters import Filters

WIDTH, WARPS = 1 << 11, 16
"""Scores that a program reads at a time, one per lane, and its warps."""
NEAR, NOTHING = 8.0, 105.0
"""Distances from the highest score, in temperatures: where top-p's search begins, since few tokens are above in a
peaked distribution, and where a token's weight is 0 in float32."""
SPARSE, SPREAD, ROUGH = 8, 0.2, 5
"""A sample of one score in SPARSE, or fewer, is worth its time; the error of what it tells, in temperatures; and the
turns that it gets."""
ALL = 64
"""Turns, far more than any row needs: a search has to end whatever a GPU computes."""
TUNING = {
    "LOG2_E": 1.4426950408889634, "NEAR": NEAR, "NOTHING": NOTHING,
    "SPARSE": SPARSE, "SPREAD": SPREAD, "ROUGH": ROUGH, "ALL": ALL,
}  # fmt: skip


@triton.jit
def _order(value):
    """A float32 as an integer of the same order, int64; 0 for both zeros."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -(1 << 31) - bits, bits)


@triton.jit
def _value(order):
    """The float32 of this order."""
    return tl.where(order < 0, -(1 << 31) - order, order).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, near, far, turn):
    """Four orders, ascending, from `low` to `high` - 1."""
    bottom, top = _value(low), _value(high)
    span = high - low
    if turn == 0:
        end = _value(far)
        reach = end - _value(near)
        p0, p1, p2 = low, near, _order(end - 0.5 * reach)
        p3 = tl.where(far < high, far, _order(end - 0.25 * reach))
    elif turn % 2 == 1:
        # Evenly by value, which suits most distributions.
        step = 0.2 * (top - bottom)
        p0, p1 = _order(bottom + step), _order(bottom + 2.0 * step)
        p2, p3 = _order(bottom + 3.0 * step), _order(bottom + 4.0 * step)
    else:
        # Evenly by order, which bounds the number of turns for any distribution.
        p0, p1, p2, p3 = low + span // 5, low + span * 2 // 5, low + span * 3 // 5, low + span * 4 // 5
    p0, p1 = tl.maximum(low, tl.minimum(p0, high - 1)), tl.maximum(low, tl.minimum(p1, high - 1))
    p2, p3 = tl.maximum(low, tl.minimum(p2, high - 1)), tl.maximum(low, tl.minimum(p3, high - 1))
    return p0, p1, p2, p3


@triton.jit
def _sums(a, b, c, d):
    """Of each: together they take a quarter of the barriers."""
    ac, bd = tl.split(tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), 0))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def _lowest(
    source, places, tiles, filled, scratch, best, scale, floor, near, far, limit, share,
    WIDTH: tl.constexpr, WEIGHED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Order of the lowest score that passes: the scores above it weigh less than limit + share * total.

    A score weighs 2 ** ((score - best) * scale), or 1 if not WEIGHED; or nothing if its order is not above `floor`. The
    answer is expected to be above `near` and up to `far`: the first turn collects these scores.

    places [WIDTH]: where each lane's first score is, from `source`; filled [WIDTH]: how many it has; tiles: the most.
    Returns these, of what was collected last, after the answer; and the order above which that is all scores, if not
    WEIGHED.
    """
    lanes = tl.arange(0, WIDTH)
    # What weighs `above` is above `high`. Above `low` it is too much, and at `high` scores pass.
    low, high, above = floor, _order(best), tl.full([], 0.0, tl.float64)
    turn, reached = 0, _order(tl.full([], float("inf"), tl.float32))
    while (high - low > 1) & (turn < TURNS):
        p0, p1, p2, p3 = _pivots(low, high, near, far, turn)
        v0, v1, v2, v3 = _value(p0), _value(p1), _value(p2), _value(p3)
        begin, end = tl.where(turn == 0, near, low), tl.where(turn == 0, far, high)
        bottom, middle, top = _value(begin), _value(end), _value(high)
        sum0, sum1 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        sum2, sum3 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        least, most = tl.full([WIDTH], float("inf"), tl.float32), tl.full([WIDTH], float("-inf"), tl.float32)
        free = lanes
        # Costs time where there is much to read, but ends the search at once where all that is left is equal.
        narrows = (tiles <= 4) | (turn > 0)
        for tile in range(tiles):
            score = tl.load(source + tile * WIDTH + places, mask=tile < filled, other=float("-inf"))
            weight = 1.0
            if WEIGHED:
                weight = tl.exp2((score - best) * scale)
            above0, above1 = (score > v0).to(tl.float32), (score > v1).to(tl.float32)
            above2, above3 = (score > v2).to(tl.float32), (score > v3).to(tl.float32)
            # By interval, so that large weights do not swallow small ones.
            sum0 += weight * (above0 - above1)
            sum1 += weight * (above1 - above2)
            sum2 += weight * (above2 - above3)
            sum3 += weight * (above3 - (score > top).to(tl.float32))
            undecided = (score > bottom) & (score <= middle)
            collected = undecided if WEIGHED else score > bottom
            # A lane has read at least as far as it writes, so a later turn may overwrite what it reads.
            tl.store(scratch + free, score, mask=collected)
            free += tl.where(collected, WIDTH, 0)
            if narrows:
                least = tl.minimum(least, tl.where(undecided, score, float("inf")))
                most = tl.maximum(most, tl.where(undecided, score, float("-inf")))
        sum0, sum1, sum2, sum3 = _sums(sum0, sum1, sum2, sum3)
        total3 = above + sum3
        total2 = total3 + sum2
        total1 = total2 + sum1
        total0 = total1 + sum0
        if turn == 0:
            limit += share * total0
        fits0, fits1, fits2, fits3 = total0 < limit, total1 < limit, total2 < limit, total3 < limit
        low = tl.where(fits0, low, tl.where(fits1, p0, tl.where(fits2, p1, tl.where(fits3, p2, p3))))
        high = tl.where(fits0, p0, tl.where(fits1, p1, tl.where(fits2, p2, tl.where(fits3, p3, high))))
        above = tl.where(
            fits0, total0, tl.where(fits1, total1, tl.where(fits2, total2, tl.where(fits3, total3, above)))
        )
        if (low >= begin) & (high <= end):
            # Everything that is still undecided has been collected. If it is nothing, the search ends.
            filled = (free - lanes) // WIDTH
            source, places, tiles, reached = scratch, lanes, tl.max(filled, 0), begin
            if tiles == 0:
                low = high
            elif narrows:
                lowest, highest = _order(tl.min(least, 0)), _order(tl.max(most, 0))
                low, high = tl.maximum(low, lowest - 1), tl.minimum(high, highest)
        tl.debug_barrier()
        turn += 1
    return high, source, tiles, filled, reached


@triton.jit
def _bracket(
    scores, scratch, step, peaks, best, temperature, scale, floor, near, share,
    WIDTH: tl.constexpr, SPREAD: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Orders above which, and up to which, the lowest score is expected that passes top-p, by a sample of every step-th
    score; `near` and the highest if the sample cannot tell.

    peaks [WIDTH]: the highest scores of as many parts of the row. They have most of the scores above the sample's
    highest, which the sample does not represent.
    """
    places, top = tl.arange(0, WIDTH) * step, _order(best)
    sample = tl.load(scores + places)
    missed = tl.sum(tl.where(peaks > tl.max(sample, 0), tl.exp2((peaks - best) * scale), 0.0), 0)
    limit = (share - 1.0) * missed / step
    filled, tiles = tl.full([WIDTH], 1, tl.int32), tl.full([], 1, tl.int32)
    lowest, _, _, _, _ = _lowest(
        scores, places, tiles, filled, scratch, best, scale, floor, near, top, limit, share, WIDTH, True, TURNS
    )
    guess = _value(lowest)
    tells = tl.sum((sample > guess).to(tl.int32), 0) >= WIDTH // 32
    begin = tl.maximum(floor, _order(guess - SPREAD * temperature))
    end = tl.minimum(top, _order(guess + SPREAD * temperature))
    return tl.where(tells, begin, near), tl.where(tells, end, top)


@triton.jit
def _below(order, temperature):
    """The highest order below whose score over temperature is lower; division joins no more than three neighbours."""
    passes, below = tl.div_rn(_value(order), temperature), order - 1
    for _ in range(2):
        below -= (tl.div_rn(_value(below), temperature) == passes).to(tl.int64)
    return below


@triton.jit(do_not_specialize=["stride", "size", "has_top_p", "has_min_p"])
def _thresholds(
    scores, temperatures, top_ks, top_ps, min_ps, thresholds, valid, scratch, stride, size, has_top_p, has_min_p,
    WIDTH: tl.constexpr, LOG2_E: tl.constexpr, NEAR: tl.constexpr, NOTHING: tl.constexpr,
    SPARSE: tl.constexpr, SPREAD: tl.constexpr, ROUGH: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """One row per program. min_ps: their logarithms."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    tiles = tl.cdiv(size, WIDTH)
    scores += row * stride
    scratch += row * tiles * WIDTH
    peaks = tl.full([WIDTH], float("-inf"), tl.float32)
    for tile in range(tiles):
        at = tile * WIDTH + lanes
        score = tl.load(scores + at, mask=at < size, other=float("-inf"))
        peaks = tl.maximum(peaks, score, propagate_nan=tl.PropagateNan.ALL)
    best = tl.max(peaks, 0)
    usable = (tl.max((peaks != peaks).to(tl.int32), 0) == 0) & (tl.abs(best) < float("inf"))
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.full([], 1.0, tl.float64)
    if has_top_p:
        top_p = tl.load(top_ps + row)
    threshold, zero = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float64)
    if usable:
        floor, top = _order(threshold), _order(best)
        source, filled = scores, tl.cdiv(size - lanes, WIDTH)
        limited = (top_k > 0) & (top_k < size)
        if limited:
            # Each lane has a score at its peak, so at least WIDTH scores are not below the lowest peak.
            near = tl.where(top_k <= WIDTH, tl.maximum(_order(tl.min(peaks, 0)) - 1, floor), floor)
            limit = top_k.to(tl.float64)
            lowest, collected, height, lengths, reached = _lowest(
                source, lanes, tiles, filled, scratch, best, 0.0, floor, near, top, limit, zero, WIDTH, False, ALL
            )
            threshold, floor = tl.div_rn(_value(lowest), temperature), _below(lowest, temperature)
            if reached <= floor:
                source, tiles, filled = collected, height, lengths
        if top_p < 1.0:
            scale = LOG2_E / temperature
            floor = tl.maximum(floor, _order(best - NOTHING * temperature))
            near, far, step = tl.maximum(floor, _order(best - NEAR * temperature)), top, size // WIDTH
            if limited:
                # The first turn must keep all, since it may overwrite what it reads.
                near = floor
            elif step >= SPARSE:
                near, far = _bracket(
                    scores, scratch, step, peaks, best, temperature, scale, floor, near, top_p, WIDTH, SPREAD, ROUGH
                )
            lowest, _, _, _, _ = _lowest(
                source, lanes, tiles, filled, scratch, best, scale, floor, near, far, zero, top_p, WIDTH, True, ALL
            )
            threshold = tl.maximum(threshold, tl.div_rn(_value(lowest), temperature))
        if has_min_p:
            threshold = tl.maximum(threshold, tl.div_rn(best, temperature) + tl.load(min_ps + row))
    tl.store(thresholds + row, threshold)
    tl.store(valid + row, usable)


def triton_thresholds(scores: Tensor, temperature: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """See `Thresholds`."""
    rows, size = scores.shape
    thresholds = torch.empty((rows, 1), dtype=torch.float32, device=scores.device)
    valid = torch.empty(rows, dtype=torch.bool, device=scores.device)
    scratch = torch.empty((rows, triton.cdiv(size, WIDTH) * WIDTH), dtype=torch.float32, device=scores.device)
    # What stands in for an absent column has its type, so that there is one variant of the kernel.
    top_p = filters.top_k.view(torch.float64) if filters.top_p is None else filters.top_p
    min_p = temperature if filters.min_p is None else filters.min_p.log()
    _thresholds[(rows,)](
        scores, temperature, filters.top_k, top_p, min_p, thresholds, valid, scratch, scores.stride(0), size,
        int(filters.top_p is not None), int(filters.min_p is not None), WIDTH=WIDTH, **TUNING, num_warps=WARPS,
    )  # fmt: skip
    return thresholds, valid

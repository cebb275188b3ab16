"""Exact thresholds of top-k, top-p and min-p, by one Triton kernel without a sort; see `Thresholds` in `filters`.

Imports triton, so import this module only where Triton is installed.

**The problem.** For each row, find the lowest score that passes. Let W(x) be the weight of all scores above x, where a
score weighs 1 for top-k, and exp((score - highest) / temperature) for top-p. A score s passes if W(s) is below a
budget: k for top-k, top_p times the weight of all scores for top-p. W never increases with x, so every score above one
that passes also passes. Finding the lowest one needs no sort, only evaluations of W.

**The search.** Read as an integer, a float32 keeps its order (`_order`), so there are fewer than 2^32 candidates. The
search keeps a bracket of them, `low` < `high`, with W(low) >= budget > W(high), and ends when they are neighbours: then
`high` is the answer, bit for bit. Each round evaluates W at four pivots in one reading of the scores. Odd rounds place
the pivots evenly by value, which suits most distributions. Even rounds place them evenly by order, which leaves a fifth
of the bracket whatever the distribution: 14 such rounds suffice for 2^32 candidates.

**Few readings of the row.** Rounds read less and less:

1. One reading finds the highest score, and rows with NaN or infinity.
2. The first round reads the row again. Its pivots are where the answer is expected, and it copies the scores from there
   (`near` < score <= `far`) to scratch memory, each lane its own, in place of the former content.
3. If the answer is there, the next rounds read the copy, and each compacts it in place to the scores that are still in
   the bracket. Usually only a few are left after two or three rounds. If the answer is elsewhere, the next round reads
   the row again with the bracket found so far, so a wrong expectation costs time and never the result.

So a row is usually read twice, in total 8 bytes per score, and the scratch memory is as large as the scores. What is
expected:

- top-k: each of the WIDTH lanes has a score at its peak, so if k <= WIDTH the answer is not below the lowest peak.
- top-p of a short row: within NEAR temperatures of the highest score.
- top-p of a long row: near the answer for a sample of WIDTH scores, which is found by the same search.
- top-p with top-k: among the scores that top-k lets pass, which its search has left in scratch memory.

**Exactness.** Counts are exact in float32. Weights are float32 and their sums are rounded, so where the weight above a
score equals top-p's budget but for rounding, a sort with float64 sums may decide otherwise. The search is in scores and
not in scores over temperature: rounded division is monotonic, so the answer is the same, and the threshold is its
quotient. Equal scores, and different ones with equal quotients, pass or fail together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.sampling.filters import Filters

WIDTH, WARPS = 1 << 11, 16
"""Scores that a program reads at a time, one per lane, and its warps."""
NEAR, WEIGHTLESS = 8.0, 105.0
"""Distances from the highest score, in temperatures: where top-p's answer is expected, since in a peaked distribution
few tokens are that likely, and where a score's weight is 0 in float32."""
SAMPLE_STRIDE, SAMPLE_ERROR, SAMPLE_ROUNDS = 8, 0.2, 5
"""Searching a sample pays off if it has one score in SAMPLE_STRIDE or fewer; the error to expect of its answer, in
temperatures; and the rounds of its search."""
MAX_ROUNDS = 64
"""Far more than any row needs: the search ends even if a GPU computes nonsense."""
TUNING = {
    "LOG2_E": 1.4426950408889634, "NEAR": NEAR, "WEIGHTLESS": WEIGHTLESS, "SAMPLE_STRIDE": SAMPLE_STRIDE,
    "SAMPLE_ERROR": SAMPLE_ERROR, "SAMPLE_ROUNDS": SAMPLE_ROUNDS, "MAX_ROUNDS": MAX_ROUNDS,
}  # fmt: skip


@triton.jit
def _order(value):
    """A float32 as an int64 of the same order; 0 for both zeros."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -(1 << 31) - bits, bits)


@triton.jit
def _value(order):
    """The float32 of this order."""
    return tl.where(order < 0, -(1 << 31) - order, order).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _below(order, temperature):
    """The highest order below `order` whose quotient by the temperature is lower. Division maps at most three
    neighbours to the same quotient."""
    quotient, below = tl.div_rn(_value(order), temperature), order - 1
    for _ in range(2):
        below -= (tl.div_rn(_value(below), temperature) == quotient).to(tl.int64)
    return below


@triton.jit
def _inside(order, low, high):
    """The closest order from `low` to `high` - 1."""
    return tl.maximum(low, tl.minimum(order, high - 1))


@triton.jit
def _pivots(low, high, near, far, turn):
    """Four orders in the bracket, ascending."""
    if turn == 0:
        # The lowest is `low`, whose weight is the total.
        end = _value(far)
        reach = end - _value(near)
        p0, p1, p2 = low, near, _order(end - 0.5 * reach)
        p3 = tl.where(far < high, far, _order(end - 0.25 * reach))
    elif turn % 2 == 1:
        bottom = _value(low)
        step = 0.2 * (_value(high) - bottom)
        p0, p1 = _order(bottom + step), _order(bottom + 2.0 * step)
        p2, p3 = _order(bottom + 3.0 * step), _order(bottom + 4.0 * step)
    else:
        span = high - low
        p0, p1, p2, p3 = low + span // 5, low + span * 2 // 5, low + span * 3 // 5, low + span * 4 // 5
    return _inside(p0, low, high), _inside(p1, low, high), _inside(p2, low, high), _inside(p3, low, high)


@triton.jit
def _sums(a, b, c, d):
    """The sum of each, in one reduction: it has a quarter of the barriers of four."""
    ac, bd = tl.split(tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), 0))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def _first(if0, if1, if2, if3, x0, x1, x2, x3, otherwise):
    """The x of the first condition that holds."""
    return tl.where(if0, x0, tl.where(if1, x1, tl.where(if2, x2, tl.where(if3, x3, otherwise))))


@triton.jit
def _read(
    source, places, counts, tiles, scratch, best, scale, v0, v1, v2, v3, top, bottom, end, narrows,
    WIDTH: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """One reading of the scores; see `_lowest` for the arguments.

    Returns the weights of the scores in each interval of the pivots v0 to v3 and `top`; how many scores each lane has
    copied to scratch; and each lane's lowest and highest score above `bottom` up to `end`, if it `narrows`.
    """
    lanes = tl.arange(0, WIDTH)
    sum0, sum1 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    sum2, sum3 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    least, most = tl.full([WIDTH], float("inf"), tl.float32), tl.full([WIDTH], float("-inf"), tl.float32)
    free = lanes
    for tile in range(tiles):
        score = tl.load(source + tile * WIDTH + places, mask=tile < counts, other=float("-inf"))
        weight = 1.0
        if WEIGHED:
            weight = tl.exp2((score - best) * scale)
        above0, above1 = (score > v0).to(tl.float32), (score > v1).to(tl.float32)
        above2, above3 = (score > v2).to(tl.float32), (score > v3).to(tl.float32)
        # Summed by interval, so that large weights do not swallow small ones.
        sum0 += weight * (above0 - above1)
        sum1 += weight * (above1 - above2)
        sum2 += weight * (above2 - above3)
        sum3 += weight * (above3 - (score > top).to(tl.float32))
        undecided = (score > bottom) & (score <= end)
        # Top-k keeps the scores above `end` too: top-p reads them.
        copied = undecided if WEIGHED else score > bottom
        # A lane has read at least as far as it writes, so this may overwrite what it reads.
        tl.store(scratch + free, score, mask=copied)
        free += tl.where(copied, WIDTH, 0)
        if narrows:
            least = tl.minimum(least, tl.where(undecided, score, float("inf")))
            most = tl.maximum(most, tl.where(undecided, score, float("-inf")))
    sum0, sum1, sum2, sum3 = _sums(sum0, sum1, sum2, sum3)
    return sum0, sum1, sum2, sum3, (free - lanes) // WIDTH, least, most


@triton.jit
def _lowest(
    source, places, counts, tiles, scratch, best, scale, floor, near, far, budget, share,
    WIDTH: tl.constexpr, WEIGHED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The search: order of the lowest score that passes, given that W(score) < budget + share * W(floor).

    A score weighs 2 ** ((score - best) * scale), or 1 if not WEIGHED, or nothing if its order is not above `floor`. The
    answer is expected above `near` and up to `far`.

    Lane i reads `counts[i]` scores, the first at source + places[i], the next ones WIDTH apart; `tiles` is the highest
    count. Returns, after the answer, source, counts and tiles of what the search has left in scratch memory; and, if
    not WEIGHED, the order above which these are all scores.
    """
    low, high = floor, _order(best)
    weight_above_high = tl.full([], 0.0, tl.float64)
    turn, complete_above = 0, _order(tl.full([], float("inf"), tl.float32))
    while (high - low > 1) & (turn < ROUNDS):
        p0, p1, p2, p3 = _pivots(low, high, near, far, turn)
        begin, end = tl.where(turn == 0, near, low), tl.where(turn == 0, far, high)
        # Costs time where there is much to read, but ends the search immediately if all scores that are left are equal.
        narrows = (tiles <= 4) | (turn > 0)
        sum0, sum1, sum2, sum3, copied, least, most = _read(
            source, places, counts, tiles, scratch, best, scale, _value(p0), _value(p1), _value(p2), _value(p3),
            _value(high), _value(begin), _value(end), narrows, WIDTH, WEIGHED,
        )  # fmt: skip
        w3 = weight_above_high + sum3
        w2 = w3 + sum2
        w1 = w2 + sum1
        w0 = w1 + sum0
        if turn == 0:
            budget += share * w0
        fits0, fits1, fits2, fits3 = w0 < budget, w1 < budget, w2 < budget, w3 < budget
        low = _first(fits0, fits1, fits2, fits3, low, p0, p1, p2, p3)
        high = _first(fits0, fits1, fits2, fits3, p0, p1, p2, p3, high)
        weight_above_high = _first(fits0, fits1, fits2, fits3, w0, w1, w2, w3, weight_above_high)
        if (low >= begin) & (high <= end):
            # Everything in the bracket has been copied.
            source, places, counts = scratch, tl.arange(0, WIDTH), copied
            tiles, complete_above = tl.max(copied, 0), begin
            if tiles == 0:
                low = high
            elif narrows:
                lowest, highest = _order(tl.min(least, 0)), _order(tl.max(most, 0))
                low, high = tl.maximum(low, lowest - 1), tl.minimum(high, highest)
        tl.debug_barrier()
        turn += 1
    return high, source, counts, tiles, complete_above


@triton.jit
def _expect_by_sample(
    scores, scratch, step, peaks, best, temperature, scale, floor, near, share,
    WIDTH: tl.constexpr, SAMPLE_ERROR: tl.constexpr, SAMPLE_ROUNDS: tl.constexpr,
):  # fmt: skip
    """Orders above which, and up to which, top-p's answer is expected by a sample of every step-th score; `near` and
    the highest score's if the sample is too small to tell.

    peaks [WIDTH]: the highest score of each lane. A sample does not represent the scores above its own highest; the
    peaks among them are most of their weight, and are added to the weight that the sample stands for.
    """
    places, top = tl.arange(0, WIDTH) * step, _order(best)
    sample = tl.load(scores + places)
    unrepresented = tl.sum(tl.where(peaks > tl.max(sample, 0), tl.exp2((peaks - best) * scale), 0.0), 0)
    # unrepresented + step * W(s) < share * (unrepresented + step * W(floor)), solved for the sample's W(s).
    budget = (share - 1.0) * unrepresented / step
    counts, tiles = tl.full([WIDTH], 1, tl.int32), tl.full([], 1, tl.int32)
    lowest, _, _, _, _ = _lowest(
        scores, places, counts, tiles, scratch, best, scale, floor, near, top, budget, share, WIDTH, True, SAMPLE_ROUNDS
    )
    answer = _value(lowest)
    enough = tl.sum((sample > answer).to(tl.int32), 0) >= WIDTH // 32
    begin = tl.maximum(floor, _order(answer - SAMPLE_ERROR * temperature))
    end = tl.minimum(top, _order(answer + SAMPLE_ERROR * temperature))
    return tl.where(enough, begin, near), tl.where(enough, end, top)


@triton.jit
def _peaks(scores, size, tiles, WIDTH: tl.constexpr):
    """[WIDTH]: the highest score of each lane; NaN if it has one."""
    lanes = tl.arange(0, WIDTH)
    peaks = tl.full([WIDTH], float("-inf"), tl.float32)
    for tile in range(tiles):
        at = tile * WIDTH + lanes
        score = tl.load(scores + at, mask=at < size, other=float("-inf"))
        peaks = tl.maximum(peaks, score, propagate_nan=tl.PropagateNan.ALL)
    return peaks


@triton.jit(do_not_specialize=["stride", "size", "has_top_p", "has_min_p"])
def _thresholds(
    scores, temperatures, top_ks, top_ps, log_min_ps, thresholds, valid, scratch, stride, size, has_top_p, has_min_p,
    WIDTH: tl.constexpr, LOG2_E: tl.constexpr, NEAR: tl.constexpr, WEIGHTLESS: tl.constexpr,
    SAMPLE_STRIDE: tl.constexpr, SAMPLE_ERROR: tl.constexpr, SAMPLE_ROUNDS: tl.constexpr, MAX_ROUNDS: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    tiles = tl.cdiv(size, WIDTH)
    scores += row * stride
    scratch += row * tiles * WIDTH
    peaks = _peaks(scores, size, tiles, WIDTH)
    best = tl.max(peaks, 0)
    usable = (tl.max((peaks != peaks).to(tl.int32), 0) == 0) & (tl.abs(best) < float("inf"))
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.full([], 1.0, tl.float64)
    if has_top_p:
        top_p = tl.load(top_ps + row)
    threshold, zero = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float64)
    if usable:
        floor, top = _order(threshold), _order(best)
        source, counts = scores, tl.cdiv(size - lanes, WIDTH)
        limited = (top_k > 0) & (top_k < size)
        if limited:
            near = tl.where(top_k <= WIDTH, tl.maximum(_order(tl.min(peaks, 0)) - 1, floor), floor)
            budget = top_k.to(tl.float64)
            lowest, copy, copied, copied_tiles, complete_above = _lowest(
                source, lanes, counts, tiles, scratch, best, 0.0, floor, near, top, budget, zero,
                WIDTH, False, MAX_ROUNDS,
            )  # fmt: skip
            threshold, floor = tl.div_rn(_value(lowest), temperature), _below(lowest, temperature)
            if complete_above <= floor:
                source, counts, tiles = copy, copied, copied_tiles
        if top_p < 1.0:
            scale = LOG2_E / temperature
            floor = tl.maximum(floor, _order(best - WEIGHTLESS * temperature))
            near, far, step = tl.maximum(floor, _order(best - NEAR * temperature)), top, size // WIDTH
            if limited:
                # The first round must copy all scores, since it may overwrite what it reads.
                near = floor
            elif step >= SAMPLE_STRIDE:
                near, far = _expect_by_sample(
                    scores, scratch, step, peaks, best, temperature, scale, floor, near, top_p,
                    WIDTH, SAMPLE_ERROR, SAMPLE_ROUNDS,
                )  # fmt: skip
            lowest, _, _, _, _ = _lowest(
                source, lanes, counts, tiles, scratch, best, scale, floor, near, far, zero, top_p,
                WIDTH, True, MAX_ROUNDS,
            )  # fmt: skip
            threshold = tl.maximum(threshold, tl.div_rn(_value(lowest), temperature))
        if has_min_p:
            threshold = tl.maximum(threshold, tl.div_rn(best, temperature) + tl.load(log_min_ps + row))
    tl.store(thresholds + row, threshold)
    tl.store(valid + row, usable)


def triton_thresholds(scores: Tensor, temperature: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """See `Thresholds`."""
    rows, size = scores.shape
    thresholds = torch.empty((rows, 1), dtype=torch.float32, device=scores.device)
    valid = torch.empty(rows, dtype=torch.bool, device=scores.device)
    scratch = torch.empty((rows, triton.cdiv(size, WIDTH) * WIDTH), dtype=torch.float32, device=scores.device)
    # The stand-in for an absent column has that column's type, so that there is one variant of the kernel.
    top_p = filters.top_k.view(torch.float64) if filters.top_p is None else filters.top_p
    log_min_p = temperature if filters.min_p is None else filters.min_p.log()
    _thresholds[(rows,)](
        scores, temperature, filters.top_k, top_p, log_min_p, thresholds, valid, scratch, scores.stride(0), size,
        int(filters.top_p is not None), int(filters.min_p is not None), WIDTH=WIDTH, **TUNING, num_warps=WARPS,
    )  # fmt: skip
    return thresholds, valid

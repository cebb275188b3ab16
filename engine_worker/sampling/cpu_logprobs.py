"""Log-probabilities on a CPU, by a kernel that numba compiles when this module is first imported.

It reads each row twice while the row is in the core's cache. Each row is computed independently, in a fixed order, so
its results have the same bits in every batch.
"""

from functools import cache, partial
from math import factorial, log
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.cpu_kernels import RowThreads, compiled

SIGNATURE = numba.void(
    numba.float32[:, ::1],  # logits
    numba.int64[::1],  # tokens
    numba.float32[::1],  # chosen
    numba.int64[::1],  # ranks
    numba.int64[:, ::1],  # ids
    numba.float32[:, ::1],  # best
    numba.int64,  # first
    numba.int64,  # last
)
EXACT: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
"""Compiler options that preserve NaN and infinities."""
SUMS = EXACT | {"fastmath": {"contract", "nsz", "reassoc"}}
"""Compiler options for sums, which may be reordered for vector instructions: always in the same way for one length."""
ONE_THREAD = 1 << 18
"""Up to this many logits are computed in the caller's thread, because waking other threads would take longer."""
PART = 1 << 12
"""Terms that are summed in float32; these partial sums are added in float64."""
GROUP = 16
"""Tokens in a group: one of every 1/16 of the vocabulary, so that maxima of groups are maxima of vectors."""
HALVINGS = 12
"""Limit on the bisection steps in `_bound`."""
ROUND = np.float32(3 << 22)
"""Adding it to a small number rounds that number to an integer, which ends up in the lowest bits of the sum."""
LEAST = np.float32(-126)
"""Exponent of the smallest normal float32."""
LOG2_E = np.float32(1 / log(2))
TERMS = tuple(np.float32(log(2) ** power / factorial(power)) for power in range(7))
"""Coefficients of the Taylor series of 2^x, which is exact to float32 from -1/2 to 1/2."""
T0, T1, T2, T3, T4, T5, T6 = TERMS


def cpu_logprobs(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of the `Logprobs` that `compute_logprobs` returns."""
    count, vocab = logits.shape
    most = min(most, vocab)
    chosen, best = np.empty(count, np.float32), np.empty((count, most), np.float32)
    ranks, ids = np.empty(count, np.int64), np.empty((count, most), np.int64)
    arrays = logits.contiguous().numpy(), tokens.numpy(), chosen, ranks, ids, best
    if count * vocab <= ONE_THREAD:
        _score(*arrays, 0, count)
    else:
        _threads().run(partial(_score, *arrays), count)
    return torch.from_numpy(chosen), torch.from_numpy(ranks), torch.from_numpy(ids), torch.from_numpy(best)


@cache
def _threads() -> RowThreads:
    return RowThreads(torch.get_num_threads())


@numba.njit(**EXACT)
def _power_of_2(x: np.float32) -> Any:
    """2^x for x from LEAST to 0. Has no branches and no table look-ups, so that the compiler can vectorize it."""
    rounded = np.float32(x + ROUND)
    rest = x - (rounded - ROUND)
    power = T0 + rest * (T1 + rest * (T2 + rest * (T3 + rest * (T4 + rest * (T5 + rest * T6)))))
    exponent = np.int32((rounded.view(np.int32) + 127) << 23)
    return power * exponent.view(np.float32)


@numba.njit(**SUMS)
def _sum_and_rank(row: NDArray[np.float32], highest: np.float32, logit: np.float32) -> tuple[float, float]:
    """Sum of e^(logit - highest), and the number of logits above `logit`."""
    total = above = np.float64(0)
    for start in range(0, len(row), PART):
        part = row[start : start + PART]
        # Counted in float32, as everything in the loop; that is exact for up to PART logits.
        partial_sum = count = np.float32(0)
        for i in range(len(part)):
            x = (part[i] - highest) * LOG2_E
            partial_sum += _power_of_2(LEAST if x < LEAST else x)
            count += np.float32(1) if part[i] > logit else np.float32(0)
        total += partial_sum
        above += count
    return total, above


@numba.njit(**EXACT)
def _find_maxima(row: NDArray[np.float32], maxima: NDArray[np.float32]) -> np.float32:
    """Write each group's maximum to `maxima`, and return the row's. NaN counts as lower than everything else."""
    for group in range(len(maxima)):
        maxima[group] = -np.inf
    for start in range(0, len(row), len(maxima)):
        part = row[start : start + len(maxima)]
        for group in range(len(part)):
            maxima[group] = part[group] if part[group] > maxima[group] else maxima[group]
    highest = np.float32(-np.inf)
    for group in range(len(maxima)):
        highest = maxima[group] if maxima[group] > highest else highest
    return highest


@numba.njit(**SUMS)
def _bound(maxima: NDArray[np.float32], highest: np.float32, most: int) -> np.float32:
    """A bound that at least `most` maxima reach, and not many more. So the `most` largest logits reach it too."""
    low = highest
    for group in range(len(maxima)):
        low = maxima[group] if maxima[group] < low else low
    high = highest
    for _ in range(HALVINGS):
        middle = (low + high) / np.float32(2)
        reaching = np.float32(0)
        for group in range(len(maxima)):
            reaching += np.float32(1) if maxima[group] >= middle else np.float32(0)
        if reaching < most:
            high = middle
        else:
            low = middle
            if reaching <= most + most // 4:
                break
    return low


@numba.njit(**EXACT)
def _select(
    row: NDArray[np.float32],
    maxima: NDArray[np.float32],
    bound: np.float32,
    ids: NDArray[np.int64],
    best: NDArray[np.float32],
) -> None:
    """Write the largest logits, descending, to `ids` and `best`: insertion sort of the logits that reach the bound."""
    last = len(ids) - 1
    for place in range(len(ids)):
        ids[place], best[place] = len(row), bound
    for group in range(len(maxima)):
        if maxima[group] < bound:
            continue
        for token in range(group, len(row), len(maxima)):
            logit = row[token] if row[token] >= bound else np.float32(-np.inf)
            place = len(ids)
            while place > 0 and (logit > best[place - 1] or (logit == best[place - 1] and token < ids[place - 1])):
                place -= 1
                if place < last:
                    ids[place + 1], best[place + 1] = ids[place], best[place]
            if place <= last:
                ids[place], best[place] = token, logit


@compiled(SIGNATURE, EXACT)
def _score(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int64],
    chosen: NDArray[np.float32],
    ranks: NDArray[np.int64],
    ids: NDArray[np.int64],
    best: NDArray[np.float32],
    first: int,
    last: int,
) -> None:
    """Compute rows `first` to `last` - 1."""
    vocab, most = logits.shape[1], ids.shape[1]
    maxima = np.empty(vocab // GROUP if vocab >= GROUP * max(most, 1) else vocab, np.float32)
    for i in range(first, last):
        row = logits[i]
        highest = _find_maxima(row, maxima)
        logit = row[tokens[i]]
        total, above = _sum_and_rank(row, highest, logit)
        scale = np.float32(np.log(total))
        chosen[i] = logit - highest - scale
        ranks[i] = 1 + np.int64(above)
        if most:
            _select(row, maxima, _bound(maxima, highest, most), ids[i], best[i])
            for place in range(most):
                best[i, place] = best[i, place] - highest - scale

"""The kernel for paged adapters on a CPU, compiled by numba when this module is first imported.

Each row is computed independently, in a fixed order, so its result has the same bits in every batch. A call takes 2 µs,
since a step of a small model makes dozens of calls.
"""

from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.cpu_kernels import RowThreads, compiled
from engine_worker.lora.paged import Add, LinearTargets, StepPages

FLOAT_ROWS = numba.float32[:, ::1]
SIGNATURE = numba.void(
    FLOAT_ROWS,  # x
    FLOAT_ROWS,  # out
    FLOAT_ROWS,  # arena
    numba.int32[:, :, ::1],  # tables
    numba.int64[::1],  # order
    numba.int32[::1],  # adapters
    numba.int32[:, ::1],  # spans
    numba.int64,  # page_ranks
    numba.int64,  # first
    numba.int64,  # last
)
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    # Sums may be reordered for vector instructions, always in the same way for one length. NaN and infinities are kept.
    "fastmath": {"contract", "nsz", "reassoc"},
}
ONE_THREAD = 1 << 22
"""Up to this many multiplications run in the caller's thread, because waking other threads would take longer."""
AT_ONCE = 4
"""Ranks that are computed in one reading of a row."""


class CpuKernel:
    """See `engine_worker.lora.paged.Kernel`."""

    def __init__(self, threads: int) -> None:
        self._threads = RowThreads(threads)

    def __call__(self, pages: StepPages, linear: LinearTargets) -> Add:
        tables = pages.tables[linear.places]
        arrays = tuple(tensor.numpy() for tensor in (pages.arena, tables, pages.order, pages.adapters, linear.spans))
        per_row = tables.shape[0] * tables.shape[2] * pages.page_ranks
        count = len(pages.order)

        def add(x: Tensor, out: Tensor) -> None:
            if out.dtype is not torch.float32:
                added = torch.zeros(out.shape)
                add(x.float(), added)
                out.add_(added)
                return
            arguments = x.numpy(), out.numpy(), *arrays, pages.page_ranks
            if count * per_row * (x.shape[1] + linear.widest) <= ONE_THREAD:
                _add(*arguments, 0, count)
            else:
                self._threads.run(partial(_add, *arguments), count)

        return add


@numba.njit(**OPTIONS)
def _shrink(row: NDArray[np.float32], a: NDArray[np.float32], factors: NDArray[np.float32]) -> None:
    """row [inputs], a [ranks, inputs] -> factors [ranks]."""
    whole = len(a) - len(a) % AT_ONCE
    for rank in range(0, whole, AT_ONCE):
        a0, a1, a2, a3 = a[rank], a[rank + 1], a[rank + 2], a[rank + 3]
        sum0 = sum1 = sum2 = sum3 = np.float32(0)
        for i in range(len(row)):
            value = row[i]
            sum0 += value * a0[i]
            sum1 += value * a1[i]
            sum2 += value * a2[i]
            sum3 += value * a3[i]
        factors[rank], factors[rank + 1], factors[rank + 2], factors[rank + 3] = sum0, sum1, sum2, sum3
    for rank in range(whole, len(a)):
        total = np.float32(0)
        for i in range(len(row)):
            total += row[i] * a[rank, i]
        factors[rank] = total


@numba.njit(**OPTIONS)
def _expand(factors: NDArray[np.float32], b: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Add factors [ranks] times b [ranks, outputs] to out [outputs]."""
    whole = len(b) - len(b) % AT_ONCE
    for rank in range(0, whole, AT_ONCE):
        b0, b1, b2, b3 = b[rank], b[rank + 1], b[rank + 2], b[rank + 3]
        factor0, factor1, factor2, factor3 = factors[rank], factors[rank + 1], factors[rank + 2], factors[rank + 3]
        for i in range(len(out)):
            out[i] += factor0 * b0[i] + factor1 * b1[i] + factor2 * b2[i] + factor3 * b3[i]
    for rank in range(whole, len(b)):
        for i in range(len(out)):
            out[i] += factors[rank] * b[rank, i]


@compiled(SIGNATURE, OPTIONS)
def _add(
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    arena: NDArray[np.float32],
    tables: NDArray[np.int32],
    order: NDArray[np.int64],
    adapters: NDArray[np.int32],
    spans: NDArray[np.int32],
    page_ranks: int,
    first: int,
    last: int,
) -> None:
    """Compute the rows `order[first:last]`."""
    inputs, block_size = x.shape[1], len(order) // len(adapters)
    num_targets, _, max_pages = tables.shape
    factors = np.empty(page_ranks, np.float32)
    for block in range(first // block_size, -(-last // block_size)):
        rows = order[max(block * block_size, first) : min((block + 1) * block_size, last)]
        for target in range(num_targets):
            start, size = spans[target, 0], spans[target, 1]
            for index in range(max_pages):
                page = tables[target, adapters[block], index]
                if page < 0:
                    continue
                a = arena[page, : page_ranks * inputs].reshape(page_ranks, inputs)
                b = arena[page, page_ranks * inputs : page_ranks * (inputs + size)].reshape(page_ranks, size)
                for token in rows:
                    if token >= 0:
                        _shrink(x[token], a, factors)
                        _expand(factors, b, out[token, start : start + size])

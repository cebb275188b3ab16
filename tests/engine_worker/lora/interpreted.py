"""Tests the adapters' kernels with Triton's interpreter, on a CPU; see `test_interpreted`."""

import numpy as np
import torch
from hypothesis import given

from engine_worker.lora import kernels
from tests.engine_worker.lora.pages import CASES, Placed, check_case, check_reuse, numbers
from tests.examples import examples


def placed(page_ranks: int, dtype: torch.dtype) -> Placed:
    return Placed(kernels.bind, page_ranks, dtype, dtype)


@examples(12)
@given(**CASES)
def test_pages_compute_the_products(page_ranks, dtype, adapters, slices, seed):
    check_case(placed(page_ranks, dtype), adapters, slices, seed)


def test_pages_are_reused():
    check_reuse(placed(8, torch.float32))


def test_a_row_does_not_depend_on_its_batch():
    adapters, some = placed(8, torch.float32), numbers(4, torch.float32)
    adapters.place(1, {0: 8, 3: 24}, some)
    adapters.place(2, {0: 40, 3: 2}, some)
    x, out = some(20, 33), some(20, 40)
    starts = np.arange(21, dtype=np.int32)
    together = out.clone()
    adapters.paged.step(np.array([1, 2] * 10), starts).add(0, "plain", x, together)
    for row in (0, 1, 18):
        alone = out[row : row + 1].clone()
        step = adapters.paged.step(np.array([1 + row % 2]), starts[:2])
        step.add(0, "plain", x[row : row + 1], alone)
        # The interpreter uses numpy's products, whose last bits depend on the row's index in its block on some CPUs.
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)

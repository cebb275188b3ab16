import numpy as np
import pytest
import torch
from hypothesis import given

from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Span
from engine_worker.lora import cpu
from engine_worker.lora.checkpoint import ModuleWeights
from engine_worker.lora.cpu import CpuKernel
from engine_worker.lora.paged import PagedAdapters
from tests.engine_worker.lora.pages import CASES, Placed, check_case, check_reuse, numbers
from tests.examples import examples

TARGET = Target(0, "mlp", "down_proj", "down_proj", Span(0, 384, 384), Span(0, 512, 512), 0)
RANKS = {1: 8, 2: 8, 3: 8, 4: 20, 5: 64}


@examples(60)
@given(**CASES)
def test_pages_compute_the_products(page_ranks, dtype, adapters, slices, seed):
    check_case(Placed(CpuKernel(1), page_ranks, dtype, torch.float32), adapters, slices, seed)


def test_pages_are_reused():
    check_reuse(Placed(CpuKernel(1), 8, torch.float32, torch.float32))


def test_unknown_adapters():
    placed, some = Placed(CpuKernel(1), 8, torch.float32, torch.float32), numbers(3, torch.float32)
    placed.place(1, {0: 1}, some)
    placed.check([1], [1], some)
    placed.paged.drop(1)
    with pytest.raises(KeyError):
        placed.paged.step(np.array([1]), np.array([0, 1], np.int32))


@pytest.fixture(params=[1, 3])
def adapters(request, monkeypatch):
    """Adapters whose products are computed by one thread, and by several."""
    monkeypatch.setattr(cpu, "ONE_THREAD", 0)
    torch.manual_seed(0)
    paged = PagedAdapters([TARGET], torch.zeros(16, 8 * 896), 8, CpuKernel(request.param))
    first = 0
    for number, rank in RANKS.items():
        pages = range(first, first := first - (-rank // 8))
        paged.place(number, [ModuleWeights(TARGET, torch.randn(rank, 384), torch.randn(rank, 512))], pages)
    return paged


def add(adapters, numbers, counts, x, out):
    added = out.clone()
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    adapters.step(np.array(numbers, np.int64), starts).add(0, "down_proj", x, added)
    return added


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        ([1, 2, 3, 0, 1, 2], [1] * 6),
        ([1, 2, 3, 1, 1, 1, 1, 1], [1] * 8),
        ([4, 5, 0, 4], [1, 3, 2, 1]),
        ([1, 2, 5, 3], [40, 1, 7, 16]),
        ([0, 1], [3, 1]),
        ([5, 1], [8, 5]),
    ],
)
def test_a_row_does_not_depend_on_its_batch(adapters, numbers, counts):
    """The result of a row has the same bits alone and in any batch."""
    x, out = torch.randn(sum(counts), 384), torch.randn(sum(counts), 512)
    together = add(adapters, numbers, counts, x, out)
    first = 0
    for number, count in zip(numbers, counts, strict=True):
        for row in range(first, first + count):
            alone = add(adapters, [number], [1], x[row : row + 1], out[row : row + 1]) if number else out[row : row + 1]
            assert torch.equal(together[row], alone[0])
        first += count

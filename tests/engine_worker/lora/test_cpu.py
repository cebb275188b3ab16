"""On a CPU a row has the same bits whatever is beside it."""

import numpy as np
import pytest
import torch

from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Span
from engine_worker.lora import cpu
from engine_worker.lora.cpu import CpuAdapters
from engine_worker.lora.placed import PlacedModule

RANKS = {1: 8, 2: 8, 3: 8, 4: 20, 5: 64}
TARGET = Target(0, "mlp", "down_proj", "down_proj", Span(0, 384, 384), Span(0, 512, 512), 0)


@pytest.fixture
def adapters():
    torch.manual_seed(0)
    found = CpuAdapters({(0, "down_proj"): 512})
    for number, rank in RANKS.items():
        found.place(number, [PlacedModule(TARGET, torch.randn(rank, 384), torch.randn(rank, 512))], ())
    return found


def add(adapters, numbers, counts, x, out):
    found = out.clone()
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    adapters.step(np.array(numbers, np.int64), starts).add(0, "down_proj", x, found)
    return found


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        ([1, 2, 3, 0, 1, 2], [1] * 6),
        ([1, 2, 3, 1, 1, 1, 1, 1], [1] * 8),
        ([4, 5, 0, 4], [1, 3, 2, 1]),
        ([1, 2, 5, 3], [40, 1, 7, 16]),
        ([0, 1], [3, 1]),
        # Side by side and equally many: taken as they stand.
        ([1] * 4 + [2] * 4 + [3] * 4, [1] * 12),
        ([0, *[1] * 4, *[2] * 4], [1] * 9),
        ([5, 1], [8, 5]),
    ],
)
def test_alone_or_beside_others(adapters, numbers, counts):
    if not adapters.invariant:
        pytest.skip("this CPU's products are not batch invariant")
    x, out = torch.randn(sum(counts), 384), torch.randn(sum(counts), 512)
    together = add(adapters, numbers, counts, x, out)
    first = 0
    for number, count in zip(numbers, counts, strict=True):
        for row in range(first, first + count):
            alone = add(adapters, [number], [1], x[row : row + 1], out[row : row + 1]) if number else out[row : row + 1]
            assert torch.equal(together[row], alone[0])
        first += count


def test_several_in_one_product_are_as_one_after_the_other(adapters, monkeypatch):
    x, out = torch.randn(9, 384), torch.randn(9, 512)
    numbers = [1, 2, 3, 1, 2, 3, 1, 4, 0]
    stacked = add(adapters, numbers, [1] * 9, x, out)
    monkeypatch.setattr(adapters, "_method", cpu.method()._replace(stackable=False))
    torch.testing.assert_close(add(adapters, numbers, [1] * 9, x, out), stacked)
    assert torch.equal(stacked[8], out[8])

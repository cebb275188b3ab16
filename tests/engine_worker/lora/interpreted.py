"""The kernels of adapters by Triton's interpreter, on a CPU; `test_kernels` runs this in a process of its own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Span
from engine_worker.lora.cpu import CpuAdapters
from engine_worker.lora.paged import PagedAdapters
from engine_worker.lora.placed import PlacedModule
from tests.examples import examples

PAGES = 240
"""Three adapters of four targets with 20 ranks each."""
CPU = torch.device("cpu")
CLOSE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.float16: {"atol": 2e-2, "rtol": 2e-2}}


def targets(hidden: int, sizes: tuple[int, ...]) -> list[Target]:
    """Those of one fused layer, and of one that is not."""
    found, first = [], 0
    for i, size in enumerate(sizes):
        found.append(Target(0, "a", f"part{i}", "fused", Span(0, hidden, hidden), Span(0, size, size), first, i))
        first += size
    inputs, outputs = Span(0, 33, 33), Span(0, hidden, hidden)
    return [*found, Target(0, "a", "plain", "plain", inputs, outputs, 0, len(found))]


class Twins:
    """The same adapters in pages, and as the CPU's own kind."""

    def __init__(self, page_ranks: int, dtype: torch.dtype) -> None:
        self.targets = targets(40, (70, 16, 5))
        self.page_ranks, self.dtype = page_ranks, dtype
        self.paged = PagedAdapters(self.targets, PAGES, page_ranks, 110, dtype, CPU)
        self.paged.arena.fill_(torch.nan)
        self.plain = CpuAdapters({(0, "fused"): 91, (0, "plain"): 40})
        self.free = list(range(PAGES))[::-1]

    def place(self, number: int, ranks: dict[int, int], some) -> None:
        """`ranks`: by target."""
        modules = [
            PlacedModule(
                self.targets[i], some(rank, self.targets[i].inputs.size), some(rank, self.targets[i].outputs.size)
            )
            for i, rank in ranks.items()
        ]
        pages = [self.free.pop() for rank in ranks.values() for _ in range(-(-rank // self.page_ranks))]
        self.paged.place(number, modules, pages)
        self.plain.place(number, modules, pages)

    def check(self, numbers, counts, some) -> torch.Tensor:
        numbers, starts = np.array(numbers, np.int64), np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        steps = [each.step(numbers, starts) for each in (self.paged, self.plain)]
        for linear, inputs, outputs in (("fused", 40, 91), ("plain", 33, 40)):
            x, out = some(starts[-1], inputs), some(starts[-1], outputs)
            found, expected = out.clone(), out.clone()
            steps[0].add(0, linear, x, found)
            steps[1].add(0, linear, x, expected)
            torch.testing.assert_close(found, expected, **CLOSE[self.dtype])
            without = np.repeat(numbers == 0, counts)
            assert torch.equal(found[without], out[without])
        return found


def numbers(seed: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (torch.randn(*shape, generator=generator) / 4).to(dtype)


ranks = st.dictionaries(st.integers(0, 3), st.integers(1, 20), min_size=1).map(
    lambda found: dict(sorted(found.items()))
)


@examples(12)
@given(
    page_ranks=st.sampled_from([8, 1, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    adapters=st.lists(ranks, min_size=1, max_size=3),
    slices=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 2, 17])), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_pages_are_as_products(page_ranks, dtype, adapters, slices, seed):
    twins, some = Twins(page_ranks, dtype), numbers(seed, dtype)
    for number, its in enumerate(adapters, 1):
        twins.place(number, its, some)
    chosen = [number if number <= len(adapters) else 0 for number, _ in slices]
    if any(chosen):
        twins.check(chosen, [count for _, count in slices], some)


def test_a_page_is_used_again():
    """Nothing of a former adapter is left, whose rank was higher."""
    twins, some = Twins(8, torch.float32), numbers(3, torch.float32)
    twins.place(1, {0: 16, 3: 8}, some)
    twins.check([1], [5], some)
    twins.free += [0, 1, 2]
    twins.free = sorted(set(twins.free) | set(range(PAGES)), reverse=True)
    twins.paged.drop(1)
    twins.place(2, {1: 3, 2: 1, 3: 1}, some)
    twins.check([2, 0], [3, 1], some)
    with pytest.raises(KeyError):
        twins.paged.step(np.array([1]), np.array([0, 1], np.int32))


def test_a_row_is_the_same_beside_others():
    twins, some = Twins(8, torch.float32), numbers(4, torch.float32)
    twins.place(1, {0: 8, 3: 24}, some)
    twins.place(2, {0: 40, 3: 2}, some)
    x, out = some(20, 33), some(20, 40)
    starts = np.arange(21, dtype=np.int32)
    together = out.clone()
    twins.paged.step(np.array([1, 2] * 10), starts).add(0, "plain", x, together)
    for row in (0, 1, 18):
        alone = out[row : row + 1].clone()
        step = twins.paged.step(np.array([1 + row % 2]), starts[:2])
        step.add(0, "plain", x[row : row + 1], alone)
        # Interpreted products are numpy's, whose last bits depend on the row's place in its block on some processors.
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)

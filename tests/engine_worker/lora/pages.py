"""Random adapters in pages, and their products computed without pages."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Span
from engine_worker.lora.checkpoint import ModuleWeights
from engine_worker.lora.paged import Kernel, PagedAdapters

PAGES = 240
"""Enough for three adapters of four targets with 20 ranks each."""
CPU = torch.device("cpu")
CLOSE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.float16: {"atol": 2e-2, "rtol": 2e-2}}
LINEARS = (("fused", 40, 91), ("plain", 33, 40))
"""Name, inputs and outputs of each linear layer."""


def targets() -> list[Target]:
    """The targets of a fused linear layer, and of a plain one."""
    fused, first = [], 0
    for i, size in enumerate((70, 16, 5)):
        fused.append(Target(0, "a", f"part{i}", "fused", Span(0, 40, 40), Span(0, size, size), first, i))
        first += size
    return [*fused, Target(0, "a", "plain", "plain", Span(0, 33, 33), Span(0, 40, 40), 0, len(fused))]


class Placed:
    def __init__(self, kernel: Kernel, page_ranks: int, dtype: torch.dtype, page_dtype: torch.dtype) -> None:
        self.targets = targets()
        self.page_ranks, self.dtype = page_ranks, dtype
        # NaN, so that a kernel that reads too much has wrong results.
        arena = torch.full((PAGES, page_ranks * 110), torch.nan, dtype=page_dtype)
        self.paged = PagedAdapters(self.targets, arena, page_ranks, kernel)
        self.modules: dict[int, list[ModuleWeights]] = {}
        self.free = list(range(PAGES))[::-1]

    def place(self, number: int, ranks: dict[int, int], some) -> None:
        """`ranks`: by target."""
        modules = [
            ModuleWeights(
                self.targets[i], some(rank, self.targets[i].inputs.size), some(rank, self.targets[i].outputs.size)
            )
            for i, rank in ranks.items()
        ]
        pages = [self.free.pop() for rank in ranks.values() for _ in range(-(-rank // self.page_ranks))]
        self.paged.place(number, modules, pages)
        self.modules[number] = modules

    def check(self, numbers, counts, some) -> None:
        numbers, starts = np.array(numbers, np.int64), np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        step = self.paged.step(numbers, starts)
        for linear, inputs, outputs in LINEARS:
            x, out = some(starts[-1], inputs), some(starts[-1], outputs)
            actual = out.clone()
            step.add(0, linear, x, actual)
            of_rows = np.repeat(numbers, counts).tolist()
            expected = torch.stack([self._expected(*each, linear) for each in zip(of_rows, x, out, strict=True)])
            torch.testing.assert_close(actual, expected, **CLOSE[self.dtype])
            without = np.repeat(numbers == 0, counts)
            assert torch.equal(actual[without], out[without])

    def _expected(self, number: int, x: Tensor, out: Tensor, linear: str) -> Tensor:
        total = out.double()
        for target, a, b in self.modules.get(number, ()):
            if target.linear == linear:
                total[target.first : target.first + b.shape[1]] += x.double() @ a.double().t() @ b.double()
        return total.to(self.dtype)


def numbers(seed: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (torch.randn(*shape, generator=generator) / 4).to(dtype)


_ranks = st.dictionaries(st.integers(0, 3), st.integers(1, 20), min_size=1).map(
    lambda found: dict(sorted(found.items()))
)
CASES = {
    "page_ranks": st.sampled_from([8, 1, 3, 16]),
    "dtype": st.sampled_from([torch.float32, torch.float16]),
    "adapters": st.lists(_ranks, min_size=1, max_size=3),
    "slices": st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 2, 17])), min_size=1, max_size=6),
    "seed": st.integers(0, 99),
}


def check_case(placed: Placed, adapters, slices, seed: int) -> None:
    some = numbers(seed, placed.dtype)
    for number, ranks in enumerate(adapters, 1):
        placed.place(number, ranks, some)
    chosen = [number if number <= len(adapters) else 0 for number, _ in slices]
    if any(chosen):
        placed.check(chosen, [count for _, count in slices], some)


def check_reuse(placed: Placed) -> None:
    """Nothing remains of an earlier adapter with a higher rank."""
    some = numbers(3, torch.float32)
    placed.place(1, {0: 16, 3: 8}, some)
    placed.check([1], [5], some)
    placed.free = list(range(PAGES))[::-1]
    placed.paged.drop(1)
    placed.place(2, {1: 3, 2: 1, 3: 1}, some)
    placed.check([2, 0], [3, 1], some)

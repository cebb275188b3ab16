"""Adapters on a CPU: two small products per adapter and linear layer.

A product must give a row the same bits in every batch. Plain ones do where the number of rows is a multiple of some
small number, which depends on the CPU and its library: so that is tested, and rows are padded.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.packing import is_batch_invariant
from engine_worker.lora.placed import PlacedModule, groups

PADDED = (4, 8, 16)
"""Multiples to try; the last is used if none is batch invariant."""
TESTED = ((48, 8), (512, 24), (2048, 64), (8, 512), (24, 1536), (192, 2048))
"""Inputs and outputs of products."""


class Pair(NamedTuple):
    """What an adapter adds to one linear layer: x a b. Where a layer fuses several maps, their ranks stand side by side
    in `a`, and `b` is block diagonal."""

    a: Tensor
    """[inputs, ranks]."""
    b: Tensor
    """[ranks, outputs]."""


Pairs = Mapping[tuple[int, str], Pair]
"""By layer and name of the linear layer."""


@lru_cache
def row_multiple() -> tuple[int, bool]:
    """Rows that products are padded to a multiple of, and whether they are batch invariant then."""
    for multiple in PADDED:
        if all(_is_invariant(inputs, outputs, multiple) for inputs, outputs in TESTED):
            return multiple, True
    return PADDED[-1], False


def _is_invariant(inputs: int, outputs: int, multiple: int) -> bool:
    weight = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(1))

    def product(x: Tensor, _: Tensor | None) -> Tensor:
        return (torch.nn.functional.pad(x, (0, 0, 0, -len(x) % multiple)) @ weight)[: len(x)]

    return is_batch_invariant(product, inputs)


class CpuAdapters:
    """See `PlacedAdapters`. Each has memory of its own: the pages are only counted."""

    def __init__(self, widths: Mapping[tuple[int, str], int]) -> None:
        """`widths`: outputs of each linear layer."""
        self._widths = widths
        self._multiple, self.invariant = row_multiple()
        self._placed: dict[int, Pairs] = {}

    def place(self, number: int, modules: Iterable[PlacedModule], pages: Sequence[int]) -> None:  # noqa: ARG002
        by_linear: dict[tuple[int, str], list[PlacedModule]] = {}
        for module in modules:
            by_linear.setdefault((module.target.layer, module.target.linear), []).append(module)
        self._placed[number] = {key: _pair(parts, self._widths[key]) for key, parts in by_linear.items()}

    def drop(self, number: int) -> None:
        self._placed.pop(number, None)

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> "CpuStep":
        found = []
        for number, tokens in groups(numbers, query_start):
            padded = np.concatenate((tokens, np.zeros(-len(tokens) % self._multiple, np.int64)))
            found.append(_Rows(self._placed[number], torch.from_numpy(tokens), torch.from_numpy(padded)))
        return CpuStep(found)


def _pair(parts: Sequence[PlacedModule], width: int) -> Pair:
    ranks = sum(len(part.a) for part in parts)
    b = parts[0].b.new_zeros(ranks, width)
    row = 0
    for part in parts:
        first, size = part.target.first, part.b.shape[1]
        b[row : row + len(part.b), first : first + size] = part.b
        row += len(part.b)
    return Pair(torch.cat([part.a for part in parts]).t().contiguous(), b)


class _Rows(NamedTuple):
    pairs: Pairs
    tokens: Tensor
    """[N]: those that have this adapter."""
    padded: Tensor
    """The same, and further ones that are of no interest."""


class CpuStep:
    """See `StepAdapters`."""

    def __init__(self, rows: Sequence[_Rows]) -> None:
        self._rows = rows

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        key = (layer, linear)
        for pairs, tokens, padded in self._rows:
            pair = pairs.get(key)
            if pair is not None:
                added = x.index_select(0, padded).mm(pair.a).mm(pair.b)
                out.index_add_(0, tokens, added[: len(tokens)])

"""Adapters on a CPU: two small products per adapter and linear layer, or per layer for several small adapters.

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
from engine_worker.lora.placed import Group, PlacedModule, groups
from engine_worker.lora.rows import Rows, choose_rows

PADDED = (4, 8, 16)
"""Multiples to try; the last is used if none is batch invariant."""
STACKED_ROWS = 16
"""Tokens of an adapter, at most, that go into one product with those of others."""
STACKED_VALUES = 1 << 22
"""Of an adapter: a stack is a copy."""
ONE_THREAD = 1 << 21
"""Multiplications for which waking other threads takes longer than what they would save."""
FEW_ROWS = 64
"""Up to this many are tested with one thread, more with all."""
TESTED = ((48, 8), (512, 24), (2048, 64), (8, 512), (24, 1536), (192, 2048))
"""Inputs and outputs of products."""


class Pair(NamedTuple):
    """What an adapter adds to one linear layer: x a b. Where a layer fuses several maps, their ranks stand side by side
    in `a`, and `b` is block diagonal."""

    a: Tensor
    """[inputs, ranks], or that of several adapters stacked."""
    b: Tensor
    """[ranks, outputs]."""
    cost: int
    """Multiplications per row."""

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "Pair":
        return cls(a, b, a.shape[-1] * (a.shape[-2] + b.shape[-1]))


Pairs = Mapping[tuple[int, str], Pair]
"""By layer and name of the linear layer."""


class Method(NamedTuple):
    """How products are computed on this machine."""

    multiple: int
    """Rows are padded to a multiple of this."""
    invariant: bool
    """Whether products are batch invariant then."""
    stackable: bool
    """Whether one batched product gives the bits of several."""


@lru_cache
def method() -> Method:
    for multiple in PADDED:
        if all(_is_invariant(inputs, outputs, multiple) for inputs, outputs in TESTED):
            return Method(multiple, True, all(_is_stackable(inputs, outputs, multiple) for inputs, outputs in TESTED))
    return Method(PADDED[-1], False, True)


def _is_stackable(inputs: int, outputs: int, multiple: int) -> bool:
    generator = torch.Generator().manual_seed(2)
    for threads, count, rows in ((1, 2, multiple), (1, 5, multiple), (torch.get_num_threads(), 3, STACKED_ROWS)):
        x, weight = (torch.randn(count, *shape, generator=generator) for shape in ((rows, inputs), (inputs, outputs)))
        with _Threads(threads):
            alone = torch.stack([_products(x[i], weight[i]) for i in range(count)])
            if not torch.equal(_products(x, weight), alone):
                return False
    return True


def _is_invariant(inputs: int, outputs: int, multiple: int) -> bool:
    weight = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(1))

    def product(x: Tensor, _: Tensor | None) -> Tensor:
        with _Threads(1 if len(x) <= FEW_ROWS else torch.get_num_threads()):
            return _products(torch.nn.functional.pad(x, (0, 0, 0, -len(x) % multiple)), weight)[: len(x)]

    return is_batch_invariant(product, inputs)


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """The product, and the sum of it and something else, side by side."""
    added = x[..., :1].expand(*x.shape[:-1], weight.shape[-1]).contiguous()
    return torch.cat((x @ weight, _add_product(added, x, weight)), -1)


def _add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return out.addmm_(x, weight) if x.dim() == 2 else out.baddbmm_(x, weight)


class CpuAdapters:
    """See `PlacedAdapters`. Each has memory of its own: the pages are only counted."""

    def __init__(self, widths: Mapping[tuple[int, str], int]) -> None:
        """`widths`: outputs of each linear layer."""
        self._widths = widths
        self._method = method()
        self._placed: dict[int, _Placed] = {}
        self._stacks: dict[tuple[int, ...], _Stack] = {}
        """Those of the latest step, by the adapters' numbers."""
        self._latest: tuple[tuple[bytes, bytes], CpuStep] | None = None
        """The latest step: most are like the one before."""

    @property
    def invariant(self) -> bool:
        return self._method.invariant

    def place(self, number: int, modules: Iterable[PlacedModule], pages: Sequence[int]) -> None:  # noqa: ARG002
        by_linear: dict[tuple[int, str], list[PlacedModule]] = {}
        for module in modules:
            by_linear.setdefault((module.target.layer, module.target.linear), []).append(module)
        pairs = {key: _pair(parts, self._widths[key]) for key, parts in by_linear.items()}
        self._placed[number] = _Placed.of(pairs)
        self._stacks, self._latest = {}, None

    def drop(self, number: int) -> None:
        self._placed.pop(number, None)
        self._latest = None

    def __contains__(self, number: int) -> bool:
        return number in self._placed

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> "CpuStep":
        key = numbers.tobytes(), query_start.tobytes()
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._plan(groups(numbers, query_start))
        return self._latest[1]

    def _plan(self, found: Iterable[Group]) -> "CpuStep":
        alone: list[Group] = []
        by_shape: dict[object, list[Group]] = {}
        for group in found:
            placed = self._placed[group.number]
            if self._method.stackable and len(group.tokens) <= STACKED_ROWS and placed.size <= STACKED_VALUES:
                by_shape.setdefault(placed.shape, []).append(group)
            else:
                alone.append(group)
        alone += [same[0] for same in by_shape.values() if len(same) == 1]
        stacked = [same for same in by_shape.values() if len(same) > 1]
        self._stacks = {key: self._stacks.get(key) or self._stack(key) for key in map(_numbers, stacked)}
        multiple = self._method.multiple
        parts = [
            *(_Part(self._placed[group.number].pairs, choose_rows([group], multiple)) for group in alone),
            *(_Part(self._stacks[_numbers(same)], choose_rows(same, multiple)) for same in stacked),
        ]
        return CpuStep(parts, torch.get_num_threads())

    def _stack(self, numbers: tuple[int, ...]) -> "_Stack":
        return _Stack([self._placed[number].pairs for number in numbers])


class _Placed(NamedTuple):
    pairs: Pairs
    size: int
    """Values."""
    shape: tuple[object, ...]
    """Those of equal shapes can be in one product."""

    @classmethod
    def of(cls, pairs: Pairs) -> "_Placed":
        size = sum(pair.a.numel() + pair.b.numel() for pair in pairs.values())
        return cls(pairs, size, tuple((key, pair.a.shape[1]) for key, pair in pairs.items()))


def _numbers(found: Sequence[Group]) -> tuple[int, ...]:
    return tuple(group.number for group in found)


def _pair(parts: Sequence[PlacedModule], width: int) -> Pair:
    ranks = sum(len(part.a) for part in parts)
    b = parts[0].b.new_zeros(ranks, width)
    row = 0
    for part in parts:
        first, size = part.target.first, part.b.shape[1]
        b[row : row + len(part.b), first : first + size] = part.b
        row += len(part.b)
    return Pair.of(torch.cat([part.a for part in parts]).t().contiguous(), b)


class _Stack:
    """The pairs of several adapters of the same shape as one tensor each, made when they are first needed."""

    def __init__(self, members: Sequence[Pairs]) -> None:
        self._members = members
        self._found: dict[tuple[int, str], Pair] = {}

    def get(self, key: tuple[int, str]) -> Pair | None:
        found = self._found.get(key)
        if found is None and key in self._members[0]:
            pairs = [member[key] for member in self._members]
            found = Pair.of(torch.stack([pair.a for pair in pairs]), torch.stack([pair.b for pair in pairs]))
            self._found[key] = found
        return found


class _Part(NamedTuple):
    """Tokens of one adapter, or those of several adapters of the same shape in one product: with few tokens each, the
    number of calls counts."""

    pairs: "Pairs | _Stack"
    rows: Rows

    def term(self, key: tuple[int, str], threads: int) -> "_Term | None":
        pair = self.pairs.get(key)
        if pair is None:
            return None
        return _Term(pair.a, pair.b, self.rows, 1 if self.rows.size * pair.cost <= ONE_THREAD else threads)


class _Term(NamedTuple):
    """What a part adds to one linear layer."""

    a: Tensor
    b: Tensor
    rows: Rows
    threads: int

    def add(self, x: Tensor, out: Tensor) -> None:
        a, b, rows, _ = self
        inputs, sums = rows.take(x), rows.take(out)
        if a.dim() == 2:
            sums.addmm_(inputs.mm(a), b)
        else:
            count = len(a)
            within = inputs.view(count, -1, inputs.shape[1]).bmm(a)
            sums.view(count, -1, sums.shape[1]).baddbmm_(within, b)
        rows.put(out, sums)


class CpuStep:
    """See `StepAdapters`. What depends on the batch alone is found once: most steps are like the one before."""

    def __init__(self, parts: Sequence[_Part], threads: int) -> None:
        self._parts = parts
        self._threads = threads
        self._terms: dict[tuple[int, str], list[_Term]] = {}

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        key = layer, linear
        terms = self._terms.get(key)
        if terms is None:
            found = (part.term(key, self._threads) for part in self._parts)
            terms = self._terms[key] = [term for term in found if term is not None]
        for term in terms:
            torch.set_num_threads(term.threads)
            try:
                term.add(x, out)
            finally:
                torch.set_num_threads(self._threads)


class _Threads:
    """Sets how many threads torch uses, for a `with` block."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._count != self._before:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count != self._before:
            torch.set_num_threads(self._before)

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

PADDED = (4, 8, 16)
"""Multiples to try; the last is used if none is batch invariant."""
STACKED_ROWS = 16
"""Tokens of an adapter, at most, that go into one product with those of others."""
STACKED_VALUES = 1 << 22
"""Of an adapter: a stack is a copy."""
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
    for count, rows in ((2, multiple), (5, multiple), (3, STACKED_ROWS)):
        x, weight = (torch.randn(count, *shape, generator=generator) for shape in ((rows, inputs), (inputs, outputs)))
        if not torch.equal(torch.bmm(x, weight), torch.stack([x[i] @ weight[i] for i in range(count)])):
            return False
    return True


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
        self._method = method()
        self._placed: dict[int, Pairs] = {}
        self._stacks: dict[tuple[int, ...], _Stack] = {}
        """Those of the latest step, by the adapters' numbers."""

    @property
    def invariant(self) -> bool:
        return self._method.invariant

    def place(self, number: int, modules: Iterable[PlacedModule], pages: Sequence[int]) -> None:  # noqa: ARG002
        by_linear: dict[tuple[int, str], list[PlacedModule]] = {}
        for module in modules:
            by_linear.setdefault((module.target.layer, module.target.linear), []).append(module)
        self._placed[number] = {key: _pair(parts, self._widths[key]) for key, parts in by_linear.items()}
        self._stacks = {}

    def drop(self, number: int) -> None:
        self._placed.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._placed

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> "CpuStep":
        # With several threads torch wakes all of them for a batched product, however small it is; for a plain one not.
        stackable = self._method.stackable and torch.get_num_threads() == 1
        alone: list[Group] = []
        alike: dict[object, list[Group]] = {}
        for group in groups(numbers, query_start):
            pairs = self._placed[group.number]
            if stackable and len(group.tokens) <= STACKED_ROWS and _size(pairs) <= STACKED_VALUES:
                alike.setdefault(_shape(pairs), []).append(group)
            else:
                alone.append(group)
        alone += [its[0] for its in alike.values() if len(its) == 1]
        stacked = [its for its in alike.values() if len(its) > 1]
        self._stacks = {key: self._stacks.get(key) or self._stack(key) for key in map(_numbers, stacked)}
        return CpuStep([*map(self._one, alone), *map(self._several, stacked)])

    def _stack(self, numbers: tuple[int, ...]) -> "_Stack":
        return _Stack([self._placed[number] for number in numbers])

    def _one(self, group: Group) -> "_One":
        rows = _padded(group.tokens, -(-len(group.tokens) // self._method.multiple) * self._method.multiple)
        return _One(self._placed[group.number], torch.from_numpy(group.tokens), torch.from_numpy(rows))

    def _several(self, its: Sequence[Group]) -> "_Several":
        longest = max(len(group.tokens) for group in its)
        size = -(-longest // self._method.multiple) * self._method.multiple
        rows = np.concatenate([_padded(group.tokens, size) for group in its])
        used = np.concatenate([i * size + np.arange(len(group.tokens)) for i, group in enumerate(its)])
        tokens = np.concatenate([group.tokens for group in its])
        parts = [torch.from_numpy(each) for each in (tokens, rows, used)]
        return _Several(self._stacks[_numbers(its)], parts[0], parts[1], parts[2], size)


def _numbers(its: Sequence[Group]) -> tuple[int, ...]:
    return tuple(group.number for group in its)


def _padded(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.concatenate((tokens, np.zeros(size - len(tokens), np.int64)))


def _size(pairs: Pairs) -> int:
    return sum(pair.a.numel() + pair.b.numel() for pair in pairs.values())


def _shape(pairs: Pairs) -> tuple[object, ...]:
    return tuple((key, pair.a.shape[1]) for key, pair in pairs.items())


def _pair(parts: Sequence[PlacedModule], width: int) -> Pair:
    ranks = sum(len(part.a) for part in parts)
    b = parts[0].b.new_zeros(ranks, width)
    row = 0
    for part in parts:
        first, size = part.target.first, part.b.shape[1]
        b[row : row + len(part.b), first : first + size] = part.b
        row += len(part.b)
    return Pair(torch.cat([part.a for part in parts]).t().contiguous(), b)


class _Stack:
    """The pairs of several adapters of the same shape as one tensor each, made when they are first needed."""

    def __init__(self, members: Sequence[Pairs]) -> None:
        self._members = members
        self._found: dict[tuple[int, str], Pair] = {}

    def get(self, key: tuple[int, str]) -> Pair | None:
        found = self._found.get(key)
        if found is None and key in self._members[0]:
            pairs = [member[key] for member in self._members]
            found = Pair(torch.stack([pair.a for pair in pairs]), torch.stack([pair.b for pair in pairs]))
            self._found[key] = found
        return found


class _One(NamedTuple):
    """The tokens of one adapter."""

    pairs: Pairs
    tokens: Tensor
    """[N]."""
    rows: Tensor
    """The same, and further ones that are of no interest."""

    def add(self, key: tuple[int, str], x: Tensor, out: Tensor) -> None:
        pair = self.pairs.get(key)
        if pair is not None:
            added = x.index_select(0, self.rows).mm(pair.a).mm(pair.b)
            _add_rows(out, self.tokens, added[: len(self.tokens)])


class _Several(NamedTuple):
    """Those of several adapters of the same shape, in one product: with few tokens each, the number of calls counts."""

    stack: _Stack
    tokens: Tensor
    """[N]: of all adapters, one after the other."""
    rows: Tensor
    """[adapters * size]: the same, padded."""
    used: Tensor
    """[N]: where they are in `rows`."""
    size: int

    def add(self, key: tuple[int, str], x: Tensor, out: Tensor) -> None:
        pair = self.stack.get(key)
        if pair is not None:
            inputs = x.index_select(0, self.rows).view(len(pair.a), self.size, -1)
            added = torch.bmm(torch.bmm(inputs, pair.a), pair.b).view(len(self.rows), -1)
            if len(self.used) < len(self.rows):
                added = added.index_select(0, self.used)
            _add_rows(out, self.tokens, added)


def _add_rows(out: Tensor, tokens: Tensor, added: Tensor) -> None:
    """`tokens`: each once."""
    if out.dtype is not torch.float32:
        out.index_add_(0, tokens, added)
        return
    # By numpy: torch wakes the other threads for a few rows, which takes a hundred times as long as the sums.
    rows, places = out.numpy(), tokens.numpy()
    rows[places] += added.numpy()


class CpuStep(NamedTuple):
    """See `StepAdapters`."""

    parts: Sequence[_One | _Several]

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        for part in self.parts:
            part.add((layer, linear), x, out)

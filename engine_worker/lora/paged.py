"""Adapters on a device: pages in one arena, which kernels read through tables."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.lora.placed import PlacedModule

BLOCK = 16
"""Rows that have one adapter: what a kernel computes at once, and the least that Triton's products take."""
NO_PAGE = -1
PADDING = -1
"""In place of a token."""


class StepPages(NamedTuple):
    """The adapters of a step as kernels read them. Its tokens are sorted by adapter and padded to blocks. A page has
    `page_ranks` rows of a [inputs], then as many of b [outputs of the target]."""

    arena: Tensor
    """[pages, page size]."""
    tables: Tensor
    """[targets, adapters, max_pages] int32: pages, or NO_PAGE."""
    order: Tensor
    """[rows] int64: the tokens, or PADDING."""
    adapters: Tensor
    """[rows / BLOCK] int32: of each block, as an index into the tables."""
    page_ranks: int


class LinearTargets(NamedTuple):
    """The targets that one linear layer computes."""

    places: slice
    """Among the model's targets."""
    spans: Tensor
    """[targets, 2] int32: first output and number of outputs of each."""
    widest: int
    """Outputs of the largest."""


Add = Callable[[Tensor, Tensor], None]
"""Adds to out [T, outputs] what the adapters make of x [T, inputs], which comes first."""
Kernel = Callable[[StepPages, LinearTargets], Add]


class _Group(NamedTuple):
    """The tokens of a step that have the same adapter."""

    number: int
    tokens: NDArray[np.int64]
    """Their indexes, in order."""


def _groups(numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> list[_Group]:
    """By number, without NO_ADAPTER."""
    of_tokens = np.repeat(numbers, np.diff(query_start))
    return [_Group(int(number), np.flatnonzero(of_tokens == number)) for number in np.unique(numbers) if number]


class PagedAdapters:
    """The adapters on a device, by the numbers that steps name."""

    def __init__(self, targets: Sequence[Target], arena: Tensor, page_ranks: int, kernel: Kernel) -> None:
        """`page_ranks`: ranks in a page. `arena`: [pages, page_ranks * (inputs and outputs, on this rank, of the
        largest target)]."""
        self.page_ranks = page_ranks
        self.arena = arena
        self._kernel = kernel
        self._num_targets = len(targets)
        self._tables: dict[int, NDArray[np.int32]] = {}
        """By number: [targets, pages of the largest module]."""
        self._linears = _linears(targets, arena.device)
        self._latest: tuple[tuple[bytes, bytes], PagedStep] | None = None
        """Most steps are like the one before."""

    def place(self, number: int, modules: Iterable[PlacedModule], pages: Sequence[int]) -> None:
        """Copy an adapter into these pages. Steps name it by this number."""
        rows: list[tuple[int, list[int]]] = []
        left = list(pages)
        for module in modules:
            count = -(-len(module.a) // self.page_ranks)
            taken, left = left[:count], left[count:]
            for i, page in enumerate(taken):
                self._write(page, module, i * self.page_ranks)
            rows.append((module.target.place, taken))
        table = np.full((self._num_targets, max(len(taken) for _, taken in rows)), NO_PAGE, np.int32)
        for place, taken in rows:
            table[place, : len(taken)] = taken
        self._tables[number] = table
        self._latest = None

    def drop(self, number: int) -> None:
        """It was evicted; it may be unknown."""
        self._tables.pop(number, None)
        self._latest = None

    def __contains__(self, number: int) -> bool:
        """Whether it was placed and not dropped since."""
        return number in self._tables

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> "PagedStep":
        """`numbers` [B]: each slice's adapter, or NO_ADAPTER; `query_start` [B + 1]: see `AttentionInputs`. Raises
        KeyError if one of them was not placed."""
        key = numbers.tobytes(), query_start.tobytes()
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._step(_groups(numbers, query_start))
        return self._latest[1]

    def _step(self, found: Sequence[_Group]) -> "PagedStep":
        device = self.arena.device
        order, adapters = (each.to(device) for each in _sorted(found))
        tables = self._tables_of(found).to(device)
        pages = StepPages(self.arena, tables, order, adapters, self.page_ranks)
        return PagedStep(pages, self._linears, self._kernel)

    def _write(self, page: int, module: PlacedModule, first: int) -> None:
        """Ranks from `first` on; those that the adapter does not have are zeros."""
        target, content = module.target, self.arena[page]
        start = 0
        for part, width in ((module.a, target.inputs.size), (module.b, target.outputs.size)):
            rows = content[start : start + self.page_ranks * width].view(self.page_ranks, width)
            ranks = part[first : first + self.page_ranks]
            rows[: len(ranks)].copy_(ranks, non_blocking=True)
            rows[len(ranks) :].zero_()
            start += self.page_ranks * width

    def _tables_of(self, found: Sequence[_Group]) -> Tensor:
        """[targets, adapters, pages] int32."""
        tables = [self._tables[group.number] for group in found]
        width = max(table.shape[1] for table in tables)
        padded = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=NO_PAGE) for each in tables]
        return torch.from_numpy(np.stack(padded, 1))


class PagedStep:
    """See `StepAdapters`."""

    def __init__(self, pages: StepPages, linears: dict[tuple[int, str], LinearTargets], kernel: Kernel) -> None:
        self._pages = pages
        self._linears = linears
        self._kernel = kernel
        self._bound: dict[tuple[int, str], Add] = {}

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        key = layer, linear
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._kernel(self._pages, self._linears[key])
        bound(x, out)


def _sorted(found: Sequence[_Group]) -> tuple[Tensor, Tensor]:
    """The rows of a step, and the adapter of each block of them; see `StepPages`."""
    order, adapters = [], []
    for index, group in enumerate(found):
        padding = -len(group.tokens) % BLOCK
        order += [group.tokens, np.full(padding, PADDING, np.int64)]
        adapters += [index] * ((len(group.tokens) + padding) // BLOCK)
    return torch.from_numpy(np.concatenate(order)), torch.tensor(adapters, dtype=torch.int32)


def _linears(targets: Sequence[Target], device: torch.device) -> dict[tuple[int, str], LinearTargets]:
    parts: dict[tuple[int, str], list[Target]] = {}
    for target in targets:
        parts.setdefault((target.layer, target.linear), []).append(target)
    return {
        key: LinearTargets(
            # Consecutive ones.
            slice(members[0].place, members[0].place + len(members)),
            torch.tensor([[each.first, each.outputs.size] for each in members], dtype=torch.int32, device=device),
            max(each.outputs.size for each in members),
        )
        for key, members in parts.items()
    }

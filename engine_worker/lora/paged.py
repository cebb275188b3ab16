"""Adapters on a GPU: pages in one arena, which Triton kernels read through tables."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.lora import kernels
from engine_worker.lora.placed import Group, PlacedModule, groups

NO_PAGE = -1


class _Linear(NamedTuple):
    """The targets that one layer computes: consecutive ones."""

    first: int
    size: int
    spans: Tensor
    """[size, 2] int32 on the device: first output and number of outputs of each."""
    widest: int


class PagedAdapters:
    """See `PlacedAdapters`."""

    def __init__(
        self,
        targets: Sequence[Target],
        num_pages: int,
        page_ranks: int,
        widest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`page_ranks`: ranks in a page. `widest`: inputs and outputs, on this rank, of the largest target."""
        self.page_ranks = page_ranks
        self.device = device
        self.arena = torch.zeros(num_pages, page_ranks * widest, dtype=dtype, device=device)
        self._num_targets = len(targets)
        self._tables: dict[int, NDArray[np.int32]] = {}
        """By number: [targets, pages of the largest module]."""
        self._linears = _linears(targets, device)
        self._latest: tuple[tuple[int, ...], Tensor] = (), torch.empty(0)
        """The tables of the latest step, on the device, and of which adapters they are."""

    def place(self, number: int, modules: Iterable[PlacedModule], pages: Sequence[int]) -> None:
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
        self._latest = (), torch.empty(0)

    def drop(self, number: int) -> None:
        self._tables.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._tables

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> "PagedStep":
        found = groups(numbers, query_start)
        order, adapters = _sorted(found)
        return PagedStep(self, self._linears, self._tables_of(found), order.to(self.device), adapters.to(self.device))

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

    def _tables_of(self, found: Sequence[Group]) -> Tensor:
        """[targets, adapters, pages] int32."""
        numbers = tuple(group.number for group in found)
        # Most steps have the adapters of the one before.
        if numbers != self._latest[0]:
            tables = [self._tables[number] for number in numbers]
            width = max(table.shape[1] for table in tables)
            padded = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=NO_PAGE) for each in tables]
            self._latest = numbers, torch.from_numpy(np.stack(padded, 1)).to(self.device)
        return self._latest[1]


class PagedStep(NamedTuple):
    """See `StepAdapters`."""

    adapters: PagedAdapters
    linears: dict[tuple[int, str], _Linear]
    tables: Tensor
    order: Tensor
    blocks: Tensor

    def add(self, layer: int, linear: str, x: Tensor, out: Tensor) -> None:
        own = self.linears[layer, linear]
        tables = self.tables[own.first : own.first + own.size]
        arena, ranks = self.adapters.arena, self.adapters.page_ranks
        kernels.add(x, out, arena, tables, self.order, self.blocks, own.spans, ranks, own.widest)


def _sorted(found: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """The rows of a step, and the adapter of each block of them; see `kernels`."""
    order, adapters = [], []
    for index, group in enumerate(found):
        padding = -len(group.tokens) % kernels.BLOCK
        order += [group.tokens, np.full(padding, -1, np.int64)]
        adapters += [index] * ((len(group.tokens) + padding) // kernels.BLOCK)
    return torch.from_numpy(np.concatenate(order)), torch.tensor(adapters, dtype=torch.int32)


def _linears(targets: Sequence[Target], device: torch.device) -> dict[tuple[int, str], _Linear]:
    parts: dict[tuple[int, str], list[Target]] = {}
    for target in targets:
        parts.setdefault((target.layer, target.linear), []).append(target)
    return {
        key: _Linear(
            members[0].place,
            len(members),
            torch.tensor([[each.first, each.outputs.size] for each in members], dtype=torch.int32, device=device),
            max(each.outputs.size for each in members),
        )
        for key, members in parts.items()
    }

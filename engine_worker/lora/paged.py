"""Adapters on a device: pages in one arena, which kernels read through page tables."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.lora.checkpoint import ModuleWeights

BLOCK = 16
"""Rows in a block, which all have the same adapter and are computed together: the smallest number for Triton's dot."""
NO_PAGE = -1
PADDING = -1
"""Marks a padding row, in place of a token's index."""
NO_ADAPTER = 0
"""Stands for no adapter, in place of an adapter's number."""


class StepPages(NamedTuple):
    """The adapters of a step, for kernels. The step's tokens are sorted by adapter and padded to blocks. A page has
    `page_ranks` rows of a [inputs], then as many rows of b [outputs of the target]."""

    arena: Tensor
    """[pages, page size]."""
    tables: Tensor
    """[targets, adapters, max_pages] int32: page numbers, or NO_PAGE."""
    order: Tensor
    """[rows] int64: indices of the tokens, or PADDING."""
    adapters: Tensor
    """[rows / BLOCK] int32: the adapter of each block, as an index into the tables."""
    page_ranks: int


class LinearTargets(NamedTuple):
    """The targets that one linear layer computes."""

    places: slice
    """Indices among the model's targets."""
    spans: Tensor
    """[targets, 2] int32: first output and number of outputs of each."""
    widest: int
    """Outputs of the largest target."""


Add = Callable[[Tensor, Tensor], None]
"""(x [T, inputs], out [T, outputs]) -> None: adds the adapters' products with x to out."""
Kernel = Callable[[StepPages, LinearTargets], Add]


class _Group(NamedTuple):
    """The tokens of a step that have the same adapter."""

    number: int
    tokens: NDArray[np.int64]
    """Their indices, ascending."""


def _groups(numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> list[_Group]:
    """The groups in the order of their numbers, without tokens that have no adapter."""
    of_tokens = np.repeat(numbers, np.diff(query_start))
    return [_Group(int(number), np.flatnonzero(of_tokens == number)) for number in np.unique(numbers) if number]


class PagedAdapters:
    """The adapters on a device, by number; see `AdapterLoad.number`."""

    def __init__(self, targets: Sequence[Target], arena: Tensor, page_ranks: int, kernel: Kernel) -> None:
        """`page_ranks`: ranks in a page. `arena`: [pages, page_ranks * (inputs + outputs of the largest target, on this
        rank)]."""
        self.page_ranks = page_ranks
        self.arena = arena
        self._kernel = kernel
        self._num_targets = len(targets)
        self._tables: dict[int, NDArray[np.int32]] = {}
        """By number: [targets, pages of the largest module]."""
        self._linears = _linears(targets, arena.device)
        self._latest: tuple[tuple[bytes, bytes], PagedStep] | None = None
        """The latest step, with its key in `step`: most steps have the same adapters as the previous one."""

    def place(self, number: int, modules: Iterable[ModuleWeights], pages: Sequence[int]) -> None:
        """Copy this rank's share of an adapter to these pages, under this number."""
        pages_of_targets: list[tuple[int, list[int]]] = []
        remaining = list(pages)
        for module in modules:
            count = -(-len(module.a) // self.page_ranks)
            module_pages, remaining = remaining[:count], remaining[count:]
            for i, page in enumerate(module_pages):
                self._write(page, module, i * self.page_ranks)
            pages_of_targets.append((module.target.place, module_pages))
        width = max(len(module_pages) for _, module_pages in pages_of_targets)
        table = np.full((self._num_targets, width), NO_PAGE, np.int32)
        for target, module_pages in pages_of_targets:
            table[target, : len(module_pages)] = module_pages
        self._tables[number] = table
        self._latest = None

    def drop(self, number: int) -> None:
        """Forget an evicted adapter, if it is known."""
        self._tables.pop(number, None)
        self._latest = None

    def __contains__(self, number: int) -> bool:
        """Whether the adapter was placed and not dropped since."""
        return number in self._tables

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> "PagedStep":
        """`numbers` [B]: each slice's adapter, or NO_ADAPTER. `query_start` [B + 1]: see `AttentionInputs`. Raises
        KeyError if an adapter was not placed."""
        key = numbers.tobytes(), query_start.tobytes()
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._step(_groups(numbers, query_start))
        return self._latest[1]

    def _step(self, groups: Sequence[_Group]) -> "PagedStep":
        device = self.arena.device
        order, adapters = (tensor.to(device) for tensor in _sorted(groups))
        tables = self._tables_of(groups).to(device)
        pages = StepPages(self.arena, tables, order, adapters, self.page_ranks)
        return PagedStep(pages, self._linears, self._kernel)

    def _write(self, page: int, module: ModuleWeights, first: int) -> None:
        """Write the ranks from `first` on to a page; ranks that the adapter lacks become zeros."""
        target, content = module.target, self.arena[page]
        start = 0
        for part, width in ((module.a, target.inputs.size), (module.b, target.outputs.size)):
            rows = content[start : start + self.page_ranks * width].view(self.page_ranks, width)
            ranks = part[first : first + self.page_ranks]
            rows[: len(ranks)].copy_(ranks, non_blocking=True)
            rows[len(ranks) :].zero_()
            start += self.page_ranks * width

    def _tables_of(self, groups: Sequence[_Group]) -> Tensor:
        """[targets, adapters, pages] int32."""
        tables = [self._tables[group.number] for group in groups]
        width = max(table.shape[1] for table in tables)
        padded = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=NO_PAGE) for table in tables]
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


def _sorted(groups: Sequence[_Group]) -> tuple[Tensor, Tensor]:
    """`order` and `adapters` of `StepPages`."""
    order, adapters = [], []
    for index, group in enumerate(groups):
        padding = -len(group.tokens) % BLOCK
        order += [group.tokens, np.full(padding, PADDING, np.int64)]
        adapters += [index] * ((len(group.tokens) + padding) // BLOCK)
    return torch.from_numpy(np.concatenate(order)), torch.tensor(adapters, dtype=torch.int32)


def _linears(targets: Sequence[Target], device: torch.device) -> dict[tuple[int, str], LinearTargets]:
    """By layer and linear layer."""
    by_linear: dict[tuple[int, str], list[Target]] = {}
    for target in targets:
        by_linear.setdefault((target.layer, target.linear), []).append(target)
    return {
        key: LinearTargets(
            # The targets of a linear layer are consecutive.
            slice(parts[0].place, parts[0].place + len(parts)),
            torch.tensor([[part.first, part.outputs.size] for part in parts], dtype=torch.int32, device=device),
            max(part.outputs.size for part in parts),
        )
        for key, parts in by_linear.items()
    }

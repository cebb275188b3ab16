"""Adapters on a device, as the forward pass finds them: by the numbers that steps name."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.layers.adapters import StepAdapters, Target
from engine_worker.layers.shard import Cut, Span

NO_ADAPTER = 0
"""In place of a number."""


class PlacedModule(NamedTuple):
    """This rank's share of what an adapter adds to one linear map."""

    target: Target
    a: Tensor
    """[r, inputs]."""
    b: Tensor
    """[r, outputs]."""


class PlacedAdapters(Protocol):
    """The adapters on a device."""

    def place(self, number: int, modules: Iterable[PlacedModule], pages: Sequence[int]) -> None:
        """Copy an adapter into these pages. Steps name it by this number."""

    def drop(self, number: int) -> None:
        """It was evicted; it may be unknown."""

    def __contains__(self, number: int) -> bool:
        """Whether it was placed and not dropped since."""

    def step(self, numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> StepAdapters:
        """`numbers` [B]: each slice's adapter, or NO_ADAPTER; `query_start` [B + 1]: see `AttentionInputs`. Raises
        KeyError if one of them was not placed."""


def share(target: Target, a: Tensor, b: Tensor) -> PlacedModule:
    """Cut a whole module to this rank's share."""
    return PlacedModule(target, a[_columns(target.inputs)], b[_columns(target.outputs)])


def _columns(span: Span) -> tuple[slice, ...]:
    return Cut(1, span).slices


class Group(NamedTuple):
    """The tokens of a step that have the same adapter."""

    number: int
    tokens: NDArray[np.int64]
    """Their indexes, in order."""


def groups(numbers: NDArray[np.int64], query_start: NDArray[np.int32]) -> list[Group]:
    """By number, without NO_ADAPTER."""
    of_tokens = np.repeat(numbers, np.diff(query_start))
    return [Group(int(number), np.flatnonzero(of_tokens == number)) for number in np.unique(numbers) if number]

"""One rank's share of an adapter."""

from typing import NamedTuple

from torch import Tensor

from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Cut, Span

NO_ADAPTER = 0
"""Stands for no adapter, in place of an adapter's number."""


class PlacedModule(NamedTuple):
    """One rank's share of `ModuleWeights`."""

    target: Target
    a: Tensor
    """[r, inputs]."""
    b: Tensor
    """[r, outputs]."""


def share(target: Target, a: Tensor, b: Tensor) -> PlacedModule:
    """Slice a whole module to this rank's share."""
    return PlacedModule(target, a[_columns(target.inputs)], b[_columns(target.outputs)])


def _columns(span: Span) -> tuple[slice, ...]:
    return Cut(1, span).slices

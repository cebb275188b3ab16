"""An adapter as a rank puts it on its device."""

from typing import NamedTuple

from torch import Tensor

from engine_worker.layers.adapters import Target
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


def share(target: Target, a: Tensor, b: Tensor) -> PlacedModule:
    """Cut a whole module to this rank's share."""
    return PlacedModule(target, a[_columns(target.inputs)], b[_columns(target.outputs)])


def _columns(span: Span) -> tuple[slice, ...]:
    return Cut(1, span).slices

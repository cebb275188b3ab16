"""Cells: indices into all scores, one row after the other."""

from torch import Tensor


def at(scores: Tensor, cells: Tensor) -> Tensor:
    """Scores [N, vocab] at cells [C] int64 -> [C]."""
    return scores.view(-1).index_select(0, cells)


def put(scores: Tensor, cells: Tensor, values: Tensor) -> None:
    """Values [C] into scores, in place."""
    scores.view(-1).index_copy_(0, cells, values)

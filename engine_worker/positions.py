"""Where tokens of a request with images stand for multimodal rotary embedding (M-RoPE, arXiv:2409.12191).

A token has three positions: time, line, column. Those of text are equal and count on. The rows of an image share a
time, and their lines and columns count from it. What follows stands behind the longest side, so that all later text has
smaller positions than indexes.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.ring.images import Image
from sluice.ring.tables import VirtualTokens

AXES = 3


class SplitImageError(ValueError):
    """The rows of an image are not consecutive in the prompt; the message says which."""


class PlacedGrid(NamedTuple):
    """An image in a prompt."""

    start: int
    """Index of its first row."""
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def saved(self) -> int:
        """By how much the positions behind it are less than the indexes."""
        return self.rows - max(self.rows // self.columns, self.columns)


class Positions:
    """Of the tokens of a request; output tokens included, however many there will be."""

    def __init__(self, grids: Sequence[PlacedGrid]) -> None:
        """`grids`: in the order of the prompt, at least one."""
        self._grids = tuple(grids)
        self._saved = tuple(accumulate((grid.saved for grid in grids), initial=0))
        """Before each grid, and behind all."""
        self._end = grids[-1].end

    @staticmethod
    def of(prompt: Sequence[int], virtual: VirtualTokens | None) -> "Positions | None":
        """None: they are the indexes. Raises SplitImageError."""
        if virtual is None:
            return None
        grids = []
        for table, first in virtual.placed:
            if isinstance(table, Image) and table.columns:
                ids = range(virtual.vocab_size + first, virtual.vocab_size + first + table.rows)
                grids.append(PlacedGrid(_start_of(ids, prompt), table.rows, table.columns))
        return Positions(sorted(grids)) if grids else None

    def behind(self, start: int) -> int | None:
        """What to add to the indexes from `start` on; None: there are images at or behind it."""
        return -self._saved[-1] if start >= self._end else None

    def between(self, start: int, end: int) -> NDArray[np.int64]:
        """[3, end - start]: of the tokens with these indexes."""
        indexes = np.arange(start, end)
        found = np.tile(indexes, (AXES, 1))
        for grid, saved in zip(self._grids, self._saved, strict=False):
            found[:, indexes >= grid.end] -= grid.saved
            inside = (indexes >= grid.start) & (indexes < grid.end)
            numbers, origin = indexes[inside] - grid.start, grid.start - saved
            found[:, inside] = origin + np.stack((np.zeros_like(numbers), *np.divmod(numbers, grid.columns)))
        return found


def _start_of(ids: range, prompt: Sequence[int]) -> int:
    """Index of the first of these ids, which must be consecutive in the prompt. Raises SplitImageError."""
    try:
        start = prompt.index(ids[0])
    except ValueError:
        start = -1
    if start < 0 or prompt[start : start + len(ids)] != list(ids):
        raise SplitImageError(f"the ids {ids[0]} to {ids[-1]} of an image must stand together in the prompt")
    return start

"""Positions of the tokens of a request with images, for multimodal rotary embedding (M-RoPE, arXiv:2409.12191).

A token has three positions: time, line and column. For text the three are equal and increase by one per token. The rows
of an image share a time; their lines and columns count from that time. The token after an image continues after the
image's longer side, so positions of later text are smaller than the tokens' indexes.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.wire.tables import Image, VirtualTokens

AXES = 3


class SplitImageError(ValueError):
    """The rows of an image are not consecutive in the prompt; the message says which."""


class PlacedGrid(NamedTuple):
    """The grid of an image in a prompt."""

    start: int
    """Index of its first row."""
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def saved(self) -> int:
        """How much smaller than their indexes it makes the positions of later text."""
        return self.rows - max(self.rows // self.columns, self.columns)


class Positions:
    """Positions of all tokens of a request, output tokens included."""

    def __init__(self, grids: Sequence[PlacedGrid]) -> None:
        """`grids`: in the order of the prompt, at least one."""
        self._grids = tuple(grids)
        self._saved = tuple(accumulate((grid.saved for grid in grids), initial=0))
        """Sums of `PlacedGrid.saved` before each grid, and after the last one."""
        self._end = grids[-1].end

    @staticmethod
    def of(prompt: Sequence[int], virtual: VirtualTokens | None) -> "Positions | None":
        """None if all positions equal the tokens' indexes. Raises SplitImageError."""
        if virtual is None:
            return None
        grids = []
        for table, first in virtual.placed:
            if isinstance(table, Image) and table.columns:
                ids = range(virtual.vocab_size + first, virtual.vocab_size + first + table.rows)
                grids.append(PlacedGrid(_start_of(ids, prompt), table.rows, table.columns))
        return Positions(sorted(grids)) if grids else None

    def behind(self, start: int) -> int | None:
        """The difference between positions and indexes from `start` on; None if that is not constant, because images
        follow."""
        return -self._saved[-1] if start >= self._end else None

    def between(self, start: int, end: int) -> NDArray[np.int64]:
        """[3, end - start]: positions of the tokens `start` to `end` - 1."""
        indexes = np.arange(start, end)
        positions = np.tile(indexes, (AXES, 1))
        for grid, saved in zip(self._grids, self._saved, strict=False):
            positions[:, indexes >= grid.end] -= grid.saved
            inside = (indexes >= grid.start) & (indexes < grid.end)
            numbers, origin = indexes[inside] - grid.start, grid.start - saved
            positions[:, inside] = origin + np.stack((np.zeros_like(numbers), *np.divmod(numbers, grid.columns)))
        return positions


def _start_of(ids: range, prompt: Sequence[int]) -> int:
    """Index of the first of these ids, which must be consecutive in the prompt. Raises SplitImageError."""
    try:
        start = prompt.index(ids[0])
    except ValueError:
        start = -1
    if start < 0 or prompt[start : start + len(ids)] != list(ids):
        raise SplitImageError(f"the ids {ids[0]} to {ids[-1]} of an image must be consecutive in the prompt")
    return start

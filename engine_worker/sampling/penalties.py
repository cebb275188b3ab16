"""What prompt and output do to the logits of their tokens.

Of an output the last token may not be known yet, where the step before draws it: it is looked up on the device.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.sampling.flat_index import at, put
from engine_worker.step import Draw


class Followed(NamedTuple):
    """Tokens of outputs that the step before gives: F cells that come after the C known ones."""

    starts: Tensor
    """[F] int64: first cell of the row."""
    draws: Tensor
    """[F] int64: draw of the step before."""
    owners: Tensor
    """[C + F] int64: of each cell, which of the F is of its row; F where none is."""

    @staticmethod
    def of(rows: Sequence[int], sizes: Sequence[int], follows: Mapping[int, int], size: int) -> "Followed | None":
        """`rows` have so many known cells; `follows`: draw of the step before, by row."""
        following = [row for row in rows if row in follows]
        if not following:
            return None
        order = {row: i for i, row in enumerate(following)}
        owners = np.repeat([order.get(row, len(order)) for row in rows], sizes)
        return Followed(
            torch.tensor(following) * size,
            torch.tensor([follows[row] for row in following]),
            torch.from_numpy(np.concatenate((owners, np.arange(len(order))))),
        )

    def cells(self, before: Tensor | None) -> Tensor:
        """[F] int64. `before`: tokens of the step before, [D] int64; None where it failed and any will do."""
        return self.starts if before is None else self.starts + before.index_select(0, self.draws)


class Repetition(NamedTuple):
    """Divides positive and multiplies negative logits of the tokens of prompt and output (CTRL, arXiv:1909.05858)."""

    cells: Tensor
    """[C] int64."""
    penalties: Tensor
    """[C + F] float32."""
    followed: Followed | None

    @staticmethod
    def of(draws: Sequence[Draw], size: int, follows: Mapping[int, int]) -> "Repetition | None":
        """In order of the rows, of `size` scores each; None where there is nothing to do. `follows`: see
        `Followed.of`."""
        rows = [row for row, draw in enumerate(draws) if draw.sampling.repetition_penalty != 1.0]
        if not rows:
            return None
        seen = [np.unique(np.concatenate([_ids(draws[row].prompt), _ids(draws[row].output)])) for row in rows]
        sizes = [len(tokens) for tokens in seen]
        penalties = np.array([draws[row].sampling.repetition_penalty for row in rows], np.float32)
        last = [row in follows for row in rows]
        return Repetition(
            torch.from_numpy(np.repeat(rows, sizes) * size + np.concatenate(seen)),
            torch.from_numpy(np.concatenate((np.repeat(penalties, sizes), penalties[last]))),
            Followed.of(rows, sizes, follows, size),
        )

    def apply(self, scores: Tensor, before: Tensor | None) -> None:
        """In place. A token that is followed and was known before gets the same twice."""
        cells = self.cells
        if self.followed is not None:
            cells = torch.cat((cells, self.followed.cells(before)))
        found = at(scores, cells)
        put(scores, cells, torch.where(found < 0, found * self.penalties, found / self.penalties))


class Frequency(NamedTuple):
    """Subtracts presence + count * frequency of the tokens of the output (as in OpenAI's API)."""

    cells: Tensor
    """[C] int64."""
    counts: Tensor
    """[C + F] float64; the last F are zeros."""
    presence: Tensor
    frequency: Tensor
    """[C + F] float64 each."""
    followed: Followed | None

    @staticmethod
    def of(draws: Sequence[Draw], size: int, follows: Mapping[int, int]) -> "Frequency | None":
        """In order of the rows, of `size` scores each; None where there is nothing to do. `follows`: see
        `Followed.of`."""
        rows = [
            row
            for row, draw in enumerate(draws)
            if (draw.sampling.presence_penalty or draw.sampling.frequency_penalty)
            and (len(draw.output) or row in follows)
        ]
        if not rows:
            return None
        counted = [np.unique(_ids(draws[row].output), return_counts=True) for row in rows]
        sizes = [len(tokens) for tokens, _ in counted]
        last = [row in follows for row in rows]
        presence = np.array([draws[row].sampling.presence_penalty for row in rows], np.float64)
        frequency = np.array([draws[row].sampling.frequency_penalty for row in rows], np.float64)
        return Frequency(
            torch.from_numpy(np.repeat(rows, sizes) * size + np.concatenate([tokens for tokens, _ in counted])),
            torch.from_numpy(np.concatenate([*(counts for _, counts in counted), np.zeros(sum(last))])),
            torch.from_numpy(np.concatenate((np.repeat(presence, sizes), presence[last]))),
            torch.from_numpy(np.concatenate((np.repeat(frequency, sizes), frequency[last]))),
            Followed.of(rows, sizes, follows, size),
        )

    def apply(self, scores: Tensor, before: Tensor | None) -> None:
        """In place."""
        cells, counts = self.cells, self.counts
        if self.followed is not None:
            new = self.followed.cells(before)
            cells = torch.cat((cells, new))
            # A token that is followed and was known before is in two cells: both get the whole count.
            same = cells == torch.cat((new, new.new_full((1,), -1))).index_select(0, self.followed.owners)
            counts = _count(counts, same, self.followed.owners, len(new))
        amount = (self.presence + self.frequency * counts).float()
        put(scores, cells, at(scores, cells) - amount)


def _count(counts: Tensor, same: Tensor, owners: Tensor, followed: int) -> Tensor:
    totals = counts.new_ones(followed + 1).index_add_(0, owners, counts * same)
    return torch.where(same, totals.index_select(0, owners), counts)


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64, len(tokens))

"""What changes logits before temperature: bias, bans, penalties, in this order.

Made from draws, on the host, and sent to the device. A cell is an index into all scores, one row after the other.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.flat_index import at, put
from engine_worker.sampling.penalties import Frequency, Repetition
from engine_worker.step import Draw


class Bias(NamedTuple):
    """Is added."""

    cells: Tensor
    """[C] int64."""
    values: Tensor
    """[C] float32."""

    @staticmethod
    def of(draws: Sequence[Draw], size: int) -> "Bias | None":
        """In order of the rows, of `size` scores each; None where there is nothing to do."""
        found = [
            (row * size + token, bias)
            for row, draw in enumerate(draws)
            for token, bias in draw.sampling.logit_bias
            if token < size
        ]
        if not found:
            return None
        cells, values = zip(*found, strict=True)
        return Bias(torch.tensor(cells), torch.tensor(values))

    def apply(self, scores: Tensor) -> None:
        """In place."""
        put(scores, self.cells, at(scores, self.cells) + self.values)


class Allowed(NamedTuple):
    """Rows that keep some scores only."""

    rows: Tensor
    """[n] int64."""
    cells: Tensor
    """[C] int64."""

    @staticmethod
    def of(draws: Sequence[Draw], size: int) -> "Allowed | None":
        """See `Bias.of`."""
        rows = [row for row, draw in enumerate(draws) if draw.sampling.allowed_token_ids]
        if not rows:
            return None
        cells = [row * size + token for row in rows for token in draws[row].sampling.allowed_token_ids if token < size]
        return Allowed(torch.tensor(rows), torch.tensor(cells, dtype=torch.int64))

    def apply(self, scores: Tensor) -> None:
        """In place."""
        values = at(scores, self.cells)
        scores.index_fill_(0, self.rows, -torch.inf)
        put(scores, self.cells, values)


class Edits(NamedTuple):
    """All of them, of a group of draws."""

    size: int
    """Scores in a row."""
    bias: Bias | None
    allowed: Allowed | None
    banned: Tensor | None
    """[C] int64: cells."""
    repetition: Repetition | None
    frequency: Frequency | None

    @staticmethod
    def of(draws: Sequence[Draw], size: int, follows: Mapping[int, int]) -> "Edits":
        """Of draws with rows of `size` scores. `follows`: for rows whose output has one more token than is known, the
        draw of the step before that gives it. Ids outside the vocabulary cannot come: they change nothing."""
        return Edits(
            size,
            Bias.of(draws, size),
            Allowed.of(draws, size),
            _banned(draws, size),
            Repetition.of(draws, size, follows),
            Frequency.of(draws, size, follows),
        )

    def apply(self, scores: Tensor, before: Tensor | None) -> None:
        """Scores [N, size] float32, changed in place, one row per draw. `before`: tokens of the step before, [D] int64;
        None where none is followed, or that step failed."""
        if scores.shape[1] != self.size:
            raise ValueError(f"logits of {scores.shape[1]} tokens, edits for {self.size}")
        if self.bias is not None:
            self.bias.apply(scores)
        if self.allowed is not None:
            self.allowed.apply(scores)
        if self.banned is not None:
            scores.view(-1).index_fill_(0, self.banned, -torch.inf)
        if self.repetition is not None:
            self.repetition.apply(scores, before)
        if self.frequency is not None:
            self.frequency.apply(scores, before)


def edits(draw: Draw) -> bool:
    """Whether there is anything to edit."""
    sampling = draw.sampling
    return bool(
        draw.banned or sampling.logit_bias or sampling.bad_token_ids or sampling.allowed_token_ids or sampling.penalized
    )


def _banned(draws: Sequence[Draw], size: int) -> Tensor | None:
    cells = [
        row * size + token
        for row, draw in enumerate(draws)
        for token in (*draw.banned, *draw.sampling.bad_token_ids)
        if token < size
    ]
    return torch.tensor(cells) if cells else None

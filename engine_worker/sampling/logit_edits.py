"""Changes to the logits that do not depend on the tokens so far: bias, then allowed and banned tokens.

They are built from draws on the host, copied to the device and applied there. Flat indices: see `flat`. Changes that
depend on the tokens so far are applied afterwards; see `step_rules`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.flat import gather_flat, scatter_flat
from engine_worker.step import Draw


class Bias(NamedTuple):
    """Adds to the logits of some tokens."""

    flat_index: Tensor
    """[C] int64."""
    values: Tensor
    """[C] float32."""

    @staticmethod
    def of(draws: Sequence[Draw], size: int) -> "Bias | None":
        """For rows of `size` scores, one per draw; None if no draw needs it."""
        entries = [
            (row * size + token, bias)
            for row, draw in enumerate(draws)
            for token, bias in draw.sampling.logit_bias
            if token < size
        ]
        if not entries:
            return None
        flat_index, values = zip(*entries, strict=True)
        return Bias(torch.tensor(flat_index), torch.tensor(values))

    def apply(self, scores: Tensor) -> None:
        scatter_flat(scores, self.flat_index, gather_flat(scores, self.flat_index) + self.values)


class Allowed(NamedTuple):
    """Rows in which only some tokens may be sampled."""

    rows: Tensor
    """[n] int64."""
    flat_index: Tensor
    """[C] int64."""

    @staticmethod
    def of(draws: Sequence[Draw], size: int) -> "Allowed | None":
        rows = [row for row, draw in enumerate(draws) if draw.sampling.allowed_token_ids]
        if not rows:
            return None
        allowed = ((row, token) for row in rows for token in draws[row].sampling.allowed_token_ids if token < size)
        flat_index = [row * size + token for row, token in allowed]
        return Allowed(torch.tensor(rows), torch.tensor(flat_index, dtype=torch.int64))

    def apply(self, scores: Tensor) -> None:
        # Save the allowed scores, clear the rows, restore these scores: this needs no mask of the vocabulary.
        values = gather_flat(scores, self.flat_index)
        scores.index_fill_(0, self.rows, -torch.inf)
        scatter_flat(scores, self.flat_index, values)


class LogitEdits(NamedTuple):
    size: int
    """Scores in a row."""
    bias: Bias | None
    allowed: Allowed | None
    banned: Tensor | None
    """[C] int64 flat index."""

    @staticmethod
    def of(draws: Sequence[Draw], size: int) -> "LogitEdits | None":
        """For rows of `size` scores, one per draw; None if no draw needs any. Token ids outside the vocabulary are
        ignored, since they cannot be sampled anyway."""
        bias, allowed, banned = Bias.of(draws, size), Allowed.of(draws, size), _banned(draws, size)
        return None if bias is None and allowed is None and banned is None else LogitEdits(size, bias, allowed, banned)

    def apply(self, scores: Tensor) -> None:
        """Edit scores [N, size] float32 in place. Raises ValueError on rows of another size."""
        if scores.shape[1] != self.size:
            raise ValueError(f"rows have {scores.shape[1]} scores, but the edits were built for {self.size}")
        if self.bias is not None:
            self.bias.apply(scores)
        if self.allowed is not None:
            self.allowed.apply(scores)
        if self.banned is not None:
            scores.view(-1).index_fill_(0, self.banned, -torch.inf)


def _banned(draws: Sequence[Draw], size: int) -> Tensor | None:
    flat_index = [
        row * size + token
        for row, draw in enumerate(draws)
        for token in (*draw.banned, *draw.sampling.bad_token_ids)
        if token < size
    ]
    return torch.tensor(flat_index) if flat_index else None

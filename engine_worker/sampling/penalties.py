"""Penalties on tokens that are in the prompt or the output already.

With overlapped steps the last token of an output may not be known on the host yet, because the previous step draws it:
it is looked up on the device. A flat index is a position in the scores [N, vocab] as one row after the other.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.step import Draw


def gather_flat(scores: Tensor, flat_index: Tensor) -> Tensor:
    """Scores [N, vocab] at flat_index [C] int64 -> [C]."""
    return scores.view(-1).index_select(0, flat_index)


def scatter_flat(scores: Tensor, flat_index: Tensor, values: Tensor) -> None:
    """Write values [C] into scores, in place."""
    scores.view(-1).index_copy_(0, flat_index, values)


class PendingTokens(NamedTuple):
    """Output tokens that the previous step draws: F of them, whose positions come after the C known ones."""

    starts: Tensor
    """[F] int64: flat index of the row's first score."""
    draws: Tensor
    """[F] int64: draw of the previous step."""
    owners: Tensor
    """[C + F] int64: for each position, which pending token belongs to its row; F if none does."""

    @staticmethod
    def of(rows: Sequence[int], sizes: Sequence[int], follows: Mapping[int, int], size: int) -> "PendingTokens | None":
        """rows, with the number of known positions of each; follows: draw of the previous step, by row."""
        following = [row for row in rows if row in follows]
        if not following:
            return None
        order = {row: i for i, row in enumerate(following)}
        owners = np.repeat([order.get(row, len(order)) for row in rows], sizes)
        return PendingTokens(
            torch.tensor(following) * size,
            torch.tensor([follows[row] for row in following]),
            torch.from_numpy(np.concatenate((owners, np.arange(len(order))))),
        )

    def flat_index(self, before: Tensor | None) -> Tensor:
        """[F] int64. before: tokens of the previous step, [D] int64; None if it failed, then any position will do."""
        return self.starts if before is None else self.starts + before.index_select(0, self.draws)


class Repetition(NamedTuple):
    """Divides positive and multiplies negative logits of the tokens in prompt and output (CTRL, arXiv:1909.05858)."""

    flat_index: Tensor
    """[C] int64."""
    penalties: Tensor
    """[C + F] float32."""
    pending: PendingTokens | None

    @staticmethod
    def of(draws: Sequence[Draw], size: int, follows: Mapping[int, int]) -> "Repetition | None":
        """For rows of `size` scores, one per draw; None if no draw needs it. follows: see `PendingTokens.of`."""
        rows = [row for row, draw in enumerate(draws) if draw.sampling.repetition_penalty != 1.0]
        if not rows:
            return None
        # Each token once: the penalty does not grow with the number of occurrences.
        seen = [np.unique(np.concatenate([_ids(draws[row].prompt), _ids(draws[row].output)])) for row in rows]
        sizes = [len(tokens) for tokens in seen]
        penalties = np.array([draws[row].sampling.repetition_penalty for row in rows], np.float32)
        last = [row in follows for row in rows]
        return Repetition(
            torch.from_numpy(np.repeat(rows, sizes) * size + np.concatenate(seen)),
            torch.from_numpy(np.concatenate((np.repeat(penalties, sizes), penalties[last]))),
            PendingTokens.of(rows, sizes, follows, size),
        )

    def apply(self, scores: Tensor, before: Tensor | None) -> None:
        flat_index = self.flat_index
        if self.pending is not None:
            # A pending token that is known from before is in twice, and both times gets the same value.
            flat_index = torch.cat((flat_index, self.pending.flat_index(before)))
        found = gather_flat(scores, flat_index)
        scatter_flat(scores, flat_index, torch.where(found < 0, found * self.penalties, found / self.penalties))


class Frequency(NamedTuple):
    """Subtracts presence + count * frequency from the logits of tokens in the output (as in OpenAI's API)."""

    flat_index: Tensor
    """[C] int64."""
    counts: Tensor
    """[C + F] float64: occurrences so far; the last F are zeros."""
    presence: Tensor
    frequency: Tensor
    """[C + F] float64 each."""
    pending: PendingTokens | None

    @staticmethod
    def of(draws: Sequence[Draw], size: int, follows: Mapping[int, int]) -> "Frequency | None":
        """For rows of `size` scores, one per draw; None if no draw needs it. follows: see `PendingTokens.of`."""
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
            PendingTokens.of(rows, sizes, follows, size),
        )

    def apply(self, scores: Tensor, before: Tensor | None) -> None:
        flat_index, counts = self.flat_index, self.counts
        if self.pending is not None:
            new = self.pending.flat_index(before)
            flat_index = torch.cat((flat_index, new))
            # A pending token that is known from before is in twice: both entries must carry the total count.
            same = flat_index == torch.cat((new, new.new_full((1,), -1))).index_select(0, self.pending.owners)
            counts = _total_counts(counts, same, self.pending.owners, len(new))
        amount = (self.presence + self.frequency * counts).float()
        scatter_flat(scores, flat_index, gather_flat(scores, flat_index) - amount)


def _total_counts(counts: Tensor, same: Tensor, owners: Tensor, pending: int) -> Tensor:
    totals = counts.new_ones(pending + 1).index_add_(0, owners, counts * same)
    return torch.where(same, totals.index_select(0, owners), counts)


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64, len(tokens))

"""Changes to the logits: first those that do not depend on the tokens so far (bias, allowed and banned tokens), then
those of `logit_rules`.

They are built on the host, copied to the device and applied there. A flat index is a position in scores [N, size] in
row-major order.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.guided.memory import WORD_BITS
from engine_worker.sampling.choose import Chosen
from engine_worker.sampling.guided_draws import MaskedRows, choose_allowed, restrict
from engine_worker.sampling.noise import highest_on_host
from engine_worker.sampling.rules import Edits, Penalized
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


class Penalty(NamedTuple):
    """See `Penalized`; for P tokens, in any rows."""

    flat_index: Tensor
    """[P] int64."""
    repetition: Tensor
    """[P] float32."""
    amounts: Tensor
    """[P] float32."""

    @staticmethod
    def of(rows: Mapping[int, Penalized], size: int) -> "Penalty":
        ids = [penalized.ids for penalized in rows.values()]
        repetition = np.array([penalized.repetition for penalized in rows.values()], np.float32)
        amounts = [
            np.zeros(len(penalized.ids), np.float32) if penalized.amounts is None else penalized.amounts
            for penalized in rows.values()
        ]
        return Penalty(
            flat_index(list(rows), ids, size),
            torch.from_numpy(np.repeat(repetition, list(map(len, ids)))),
            torch.from_numpy(np.concatenate(amounts)),
        )

    def apply(self, scores: Tensor) -> None:
        values = gather_flat(scores, self.flat_index)
        values = torch.where(values < 0, values * self.repetition, values / self.repetition)
        scatter_flat(scores, self.flat_index, values - self.amounts)


class DeviceMasks(NamedTuple):
    """`MaskedRows` on the device."""

    rows: Tensor
    """[G] int64."""
    bits: Tensor
    """[G, words] int32, one bit per token id."""

    @staticmethod
    def of(masked: MaskedRows) -> "DeviceMasks":
        # Indexing copies the masks, since the guide worker writes the next step's masks to the same memory.
        bits = masked.masks[masked.mask_index].view(np.int32)
        return DeviceMasks(torch.from_numpy(masked.rows), torch.from_numpy(bits))

    def apply(self, scores: Tensor) -> None:
        size = scores.shape[1]
        places = torch.arange(WORD_BITS, dtype=torch.int32, device=scores.device)
        allowed = (self.bits.unsqueeze(-1) >> places & 1).flatten(1)[:, :size].bool()
        scores.index_copy_(0, self.rows, scores.index_select(0, self.rows).masked_fill_(~allowed, -torch.inf))


class DeviceEdits(NamedTuple):
    """Changes by logit rules to scores [N, size]: bans, then penalties, then guides' masks. Few operations for all rows
    together, which suits a GPU."""

    banned: Tensor | None
    """[C] int64 flat index."""
    penalty: Penalty | None
    allowed: DeviceMasks | None

    @staticmethod
    def of(rows: Mapping[int, Edits], masked: MaskedRows | None, size: int) -> "DeviceEdits":
        """For rows of `size` scores."""
        banned = {row: np.concatenate(edits.banned) for row, edits in rows.items() if edits.banned}
        penalized = {row: edits.penalized for row, edits in rows.items() if edits.penalized is not None}
        return DeviceEdits(
            flat_index(list(banned), list(banned.values()), size) if banned else None,
            Penalty.of(penalized, size) if penalized else None,
            None if masked is None else DeviceMasks.of(masked),
        )

    def apply(self, scores: Tensor) -> None:
        """In place."""
        if self.banned is not None:
            scores.view(-1).index_fill_(0, self.banned, -torch.inf)
        if self.penalty is not None:
            self.penalty.apply(scores)
        if self.allowed is not None:
            self.allowed.apply(scores)


class HostEdits(NamedTuple):
    """`DeviceEdits` on a CPU: row by row, so each row stays in the core's cache. Takes a third of the time."""

    rows: Mapping[int, Edits]
    masked: MaskedRows | None

    def apply(self, scores: Tensor) -> None:
        """In place."""
        values = scores.numpy()
        # Invalid logits end their sequence with a fault; a warning of numpy would not say which sequence it is.
        with np.errstate(all="ignore"):
            self._ban_and_penalize(values)
            if self.masked is not None:
                restrict(values, self.masked)

    def choose_greedily(self, scores: Tensor) -> Chosen:
        """The same result as `apply` and then `Greedy`."""
        values = scores.numpy()
        with np.errstate(all="ignore"):
            self._ban_and_penalize(values)
            if self.masked is None:
                peaks, tokens = highest_on_host(values)
            else:
                tokens, peaks = choose_allowed(values, self.masked)
        return Chosen(torch.from_numpy(tokens), torch.from_numpy(np.isfinite(peaks)))

    def _ban_and_penalize(self, values: NDArray[np.float32]) -> None:
        for row, edits in self.rows.items():
            for ids in edits.banned:
                values[row, ids] = -np.inf
            if edits.penalized is not None:
                _penalize(values[row], edits.penalized)


def _penalize(row: NDArray[np.float32], penalized: Penalized) -> None:
    ids, repetition, amounts = penalized
    # All ids are in range, and `clip` is faster than the default mode, which copies them.
    values = row.take(ids, mode="clip")
    if repetition != 1.0:
        factor = np.float32(repetition)
        # For both signs, the penalized score is the lower of the two if the penalty is above 1, else the higher one.
        bound = np.minimum if repetition > 1.0 else np.maximum
        multiplied = values * factor
        values /= factor
        bound(values, multiplied, out=values)
    if amounts is not None:
        values -= amounts
    row[ids] = values


def flat_index(rows: Sequence[int], ids: Sequence[NDArray[np.int64]], size: int) -> Tensor:
    """Flat indices [C] int64 of the token ids `ids[i]` in row `rows[i]`, for all i."""
    starts = np.repeat(np.array(rows, np.int64) * size, [len(each) for each in ids])
    return torch.from_numpy(starts + np.concatenate(ids))


def gather_flat(scores: Tensor, flat_index: Tensor) -> Tensor:
    """Scores [N, size] at flat_index [C] int64 -> [C]."""
    return scores.view(-1).index_select(0, flat_index)


def scatter_flat(scores: Tensor, flat_index: Tensor, values: Tensor) -> None:
    """Write values [C] into scores, in place."""
    scores.view(-1).index_copy_(0, flat_index, values)

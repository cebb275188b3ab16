"""The logit rules of a step: run on the host, applied to the logits on the device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.guided.masks import MaskRequest
from engine_worker.guided.memory import WORD_BITS
from engine_worker.sampling.choose import Chosen
from engine_worker.sampling.flat import flat_index, gather_flat, scatter_flat
from engine_worker.sampling.logit_rules import LogitRules
from engine_worker.sampling.masked import MaskedRows, choose_allowed, restrict
from engine_worker.sampling.noise import highest_on_host
from engine_worker.sampling.processors import ProcessedRow
from engine_worker.sampling.rules import Edits, Penalized
from engine_worker.step import Draw

FOLLOWS_NONE = -1
"""In place of a token id: the draw does not follow a token of the previous step."""


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


class Allowed(NamedTuple):
    """`MaskedRows` on the device."""

    rows: Tensor
    """[G] int64."""
    bits: Tensor
    """[G, words] int32, one bit per token id."""

    @staticmethod
    def of(masked: MaskedRows) -> "Allowed":
        # Indexing copies the masks, since the guide worker writes the next step's masks to the same memory.
        return Allowed(torch.from_numpy(masked.rows), torch.from_numpy(masked.masks[masked.mask_index].view(np.int32)))

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
    allowed: Allowed | None

    @staticmethod
    def of(rows: Mapping[int, Edits], masked: MaskedRows | None, size: int) -> "DeviceEdits":
        """For rows of `size` scores."""
        banned = {row: np.concatenate(edits.banned) for row, edits in rows.items() if edits.banned}
        penalized = {row: edits.penalized for row, edits in rows.items() if edits.penalized is not None}
        return DeviceEdits(
            flat_index(list(banned), list(banned.values()), size) if banned else None,
            Penalty.of(penalized, size) if penalized else None,
            None if masked is None else Allowed.of(masked),
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
    """`DeviceEdits` on a CPU: row by row, so that each row stays in the cache, which takes a third of the time."""

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


class DrawRules(NamedTuple):
    """The rules of one draw, and the tokens to feed them."""

    draw: int
    """Index in the step."""
    rules: LogitRules
    output: Sequence[int]
    known: int
    """Length of `output` when the step was planned: it may have grown since."""
    follows: int | None
    """Draw of the previous step that samples the token after the `known` ones; None: all tokens are known."""
    drafted: Sequence[int]
    """Draft tokens after these."""
    may_end: bool
    """Whether the ids that end the sequence may be sampled."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules of a step's draws, in the order of the draws."""

    draws: tuple[DrawRules, ...]
    fed: tuple[DrawRules, ...]
    """Draws whose rules must be fed tokens: all but those with only a guide, which the guide worker advances."""

    @staticmethod
    def of(draws: Sequence[Draw], follows: Mapping[int, int]) -> "StepRules | None":
        """None if no draw has rules."""
        draw_rules = tuple(
            DrawRules(i, draw.rules, draw.output, len(draw.output), follows.get(i), draw.drafted, not draw.banned)
            for i, draw in enumerate(draws)
            if isinstance(draw.rules, LogitRules)
        )
        if not draw_rules:
            return None
        return StepRules(draw_rules, tuple([draw for draw in draw_rules if not draw.rules.only_guided]))

    @property
    def is_guided(self) -> bool:
        return any(rules.guide is not None for _, rules, *_ in self.draws)

    def guided(self, previous_tokens: Sequence[int] | None) -> dict[int, MaskRequest]:
        """Requests for masks, by draw. `previous_tokens`: see `advanced`."""
        requests = {}
        for draw, rules, output, known, follows, drafted, may_end in self.draws:
            if rules.guide is not None:
                followed = () if follows is None or previous_tokens is None else (previous_tokens[follows],)
                requests[draw] = MaskRequest(rules.guide, output, known, (*followed, *drafted), may_end)
        return requests

    def draws_with_processors(self) -> list[int]:
        return [draw for draw, rules, *_ in self.draws if rules.processing is not None]

    def processed(self, logits: Tensor) -> list[ProcessedRow]:
        """logits [P, vocab]: a row for each of `draws_with_processors`."""
        processed = [(draw, rules.processing) for draw, rules, *_ in self.draws if rules.processing is not None]
        return [ProcessedRow(draw, row, processing) for (draw, processing), row in zip(processed, logits, strict=True)]

    def followed(self, previous_tokens: Sequence[int] | None) -> list[int]:
        """For each of `draws_with_processors` the token of the previous step that it follows, or FOLLOWS_NONE.
        `previous_tokens`: see `advanced`."""
        return [
            FOLLOWS_NONE if follows is None or previous_tokens is None else previous_tokens[follows]
            for _, rules, _, _, follows, *_ in self.draws
            if rules.processing is not None
        ]

    @contextmanager
    def advanced(self, previous_tokens: Sequence[int] | None) -> Iterator[dict[int, Edits]]:
        """Feed the rules the tokens before their draws, and yield the edits of draws that have any, by draw; at the
        end of the body, roll back the tokens in flight. `previous_tokens`: tokens of the previous step; None if it
        failed, which makes the results of draws that follow it meaningless."""
        edits = {}
        for draw, rules, output, known, follows, drafted, _ in self.fed:
            for token in output[rules.num_fed : known]:
                rules.feed(token)
            if follows is not None and previous_tokens is not None:
                rules.feed(previous_tokens[follows])
            # The draws of a sequence come in order, each with one more draft token.
            for token in drafted[rules.num_fed - known :]:
                rules.feed(token)
            if edit := rules.edits():
                edits[draw] = edit
        try:
            yield edits
        finally:
            # The followed token is not final: the step that samples it can still turn out to have failed.
            for _, rules, _, known, *_ in self.fed:
                rules.truncate(known)

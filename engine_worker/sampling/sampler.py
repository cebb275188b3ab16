"""From logits to tokens. Draws that need the same work go together, so an odd one costs its own work only.

Everything that draws say is made into tensors first and sent to the device in one go (`Plan`), so that sampling itself
is queued there behind the model and nothing waits for anything.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.choose import Filtered, Free, Greedy
from engine_worker.sampling.gumbel_max import Race, by_torch
from engine_worker.sampling.logit_edits import Edits, edits
from engine_worker.sampling.logprobs import Scores, score
from engine_worker.step import Draw, Drawn
from sluice.ring.errors import ErrorCode, Fault

Kind = type[Greedy] | type[Free] | type[Filtered]

NOTHING = Drawn(
    0,
    fault=Fault(
        ErrorCode.NOTHING_TO_SAMPLE.name,
        "no token can be sampled: bans leave none, or the model's logits are not numbers",
    ),
)


class Sampled(NamedTuple):
    """What D draws gave, still as tensors."""

    tokens: Tensor
    """[D] int64."""
    valid: Tensor
    """[D] bool: whether there was anything to sample; where not, the token is any."""
    scores: Scores | None
    """Of the draws that ask for logprobs, in order."""
    short: Tensor | None = None
    """[] bool: whether some filter lets more pass than was looked at, so that all means nothing. None: it cannot be."""

    def results(self, draws: Sequence[Draw]) -> list[Drawn]:
        """As plain data, one per draw; the tensors have to be there."""
        pairs = zip(self.tokens.tolist(), self.valid.tolist(), strict=True)
        if self.scores is None:
            return [Drawn(token) if good else NOTHING for token, good in pairs]
        asked = _asked(draws)
        entries = dict(zip(asked, self.scores.entries([draws[i].sampling.logprobs or 0 for i in asked]), strict=True))
        return [Drawn(token, entries.get(i)) if good else NOTHING for i, (token, good) in enumerate(pairs)]


class Group(NamedTuple):
    """Draws that are made in the same way."""

    rows: Tensor | None
    """[N] int64: their rows of the logits; None: all, in order."""
    edits: Edits | None
    choose: Greedy | Free | Filtered


class Scored(NamedTuple):
    """Draws that ask for logprobs."""

    rows: Tensor | None
    """As in `Group`."""
    draws: Tensor | None
    """[N] int64; None: all."""
    most: int
    """Alternatives that one of them asks for."""


class Plan(NamedTuple):
    """All that sampling needs besides logits."""

    groups: tuple[Group, ...]
    order: Tensor | None
    """[D] int64: where each draw is among those of all groups; None: as they are."""
    scored: Scored | None

    @staticmethod
    def of(
        draws: Sequence[Draw], rows: Sequence[int], num_rows: int, vocab_size: int, follows: Mapping[int, int]
    ) -> "Plan":
        """For logits [num_rows, vocab_size]. `rows`: the row of each draw. `follows`: for draws whose output has one
        more token than is known, the draw of the step before that gives it."""
        groups: dict[tuple[Kind, bool], list[int]] = defaultdict(list)
        for i, draw in enumerate(draws):
            groups[_kind(draw), edits(draw)].append(i)
        members = list(groups.values())
        return Plan(
            tuple(
                Group(
                    _rows([rows[i] for i in chosen], num_rows),
                    _edits(draws, chosen, vocab_size, follows) if edited else None,
                    kind.of([draws[i] for i in chosen]),
                )
                for (kind, edited), chosen in groups.items()
            ),
            torch.tensor([i for chosen in members for i in chosen]).argsort() if len(members) > 1 else None,
            _scored(draws, rows, num_rows),
        )


def sample(
    logits: Tensor, plan: Plan, before: Tensor | None = None, *, widen: bool = True, race: Race = by_torch
) -> Sampled:
    """Logits [R, vocab] float32, left as they are. `before`: tokens of the step before, [D] int64, where draws follow
    it; None where it failed. `widen`: see `Filtered`; without it nothing waits for the device. `race`: see `Free`."""
    chosen = []
    for group in plan.groups:
        scores = logits if group.rows is None else logits.index_select(0, group.rows)
        if group.edits is not None:
            scores = logits.clone() if scores is logits else scores
            group.edits.apply(scores, before)
        chosen.append(group.choose(scores, widen=widen, race=race))
    tokens, valid = chosen[0].tokens, chosen[0].valid
    if plan.order is not None:
        tokens = torch.cat([each.tokens for each in chosen]).index_select(0, plan.order)
        valid = torch.cat([each.valid for each in chosen]).index_select(0, plan.order)
    short = [each.short for each in chosen if each.short is not None]
    return Sampled(tokens, valid, _scores(logits, plan.scored, tokens), torch.cat(short).any() if short else None)


def _kind(draw: Draw) -> Kind:
    sampling = draw.sampling
    if sampling.greedy:
        return Greedy
    return Filtered if sampling.top_k or sampling.top_p < 1.0 else Free


def _edits(draws: Sequence[Draw], members: list[int], vocab_size: int, follows: Mapping[int, int]) -> Edits:
    following = {row: follows[i] for row, i in enumerate(members) if i in follows} if follows else {}
    return Edits.of([draws[i] for i in members], vocab_size, following)


def _rows(rows: list[int], num_rows: int) -> Tensor | None:
    return None if rows == list(range(num_rows)) else torch.tensor(rows)


def _asked(draws: Sequence[Draw]) -> list[int]:
    return [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None]


def _scored(draws: Sequence[Draw], rows: Sequence[int], num_rows: int) -> Scored | None:
    asked = _asked(draws)
    if not asked:
        return None
    most = max(draws[i].sampling.logprobs or 0 for i in asked)
    picked = None if len(asked) == len(draws) else torch.tensor(asked)
    return Scored(_rows([rows[i] for i in asked], num_rows), picked, most)


def _scores(logits: Tensor, scored: Scored | None, tokens: Tensor) -> Scores | None:
    if scored is None:
        return None
    rows = logits if scored.rows is None else logits.index_select(0, scored.rows)
    return score(rows, tokens if scored.draws is None else tokens.index_select(0, scored.draws), scored.most)

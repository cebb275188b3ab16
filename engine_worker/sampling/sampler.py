"""From logits to tokens. Draws that need the same work go together, so an odd one costs its own work only."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.choose import filtered, free, greedy
from engine_worker.sampling.edits import edit, edits
from engine_worker.sampling.logprobs import Scores, score
from engine_worker.step import Draw, Drawn
from sluice.ring.errors import ErrorCode, Fault

Chooser = Callable[[Tensor, Sequence[Draw]], tuple[Tensor, Tensor]]

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

    def results(self, draws: Sequence[Draw]) -> list[Drawn]:
        """As plain data, one per draw; the tensors have to be there."""
        pairs = zip(self.tokens.tolist(), self.valid.tolist(), strict=True)
        if self.scores is None:
            return [Drawn(token) if good else NOTHING for token, good in pairs]
        asked = _asked(draws)
        entries = dict(zip(asked, self.scores.entries([draws[i].sampling.logprobs or 0 for i in asked]), strict=True))
        return [Drawn(token, entries.get(i)) if good else NOTHING for i, (token, good) in enumerate(pairs)]


def sample(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Sampled:
    """Logits [R, vocab] float32, left as they are; `rows`: the row of each draw."""
    groups: dict[tuple[Chooser, bool], list[int]] = defaultdict(list)
    for i, draw in enumerate(draws):
        groups[_chooser(draw), edits(draw)].append(i)
    chosen = [(members, _choose(logits, rows, draws, members, *how)) for how, members in groups.items()]
    if len(chosen) == 1:
        tokens, valid = chosen[0][1]
    else:
        order = torch.tensor([i for members, _ in chosen for i in members]).argsort().to(logits.device)
        tokens = torch.cat([tokens for _, (tokens, _) in chosen]).index_select(0, order)
        valid = torch.cat([valid for _, (_, valid) in chosen]).index_select(0, order)
    return Sampled(tokens, valid, _scores(logits, rows, draws, tokens))


def _choose(
    logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], members: list[int], choose: Chooser, edited: bool
) -> tuple[Tensor, Tensor]:
    group = [draws[i] for i in members]
    scores = _rows(logits, [rows[i] for i in members], copy=edited)
    if edited:
        edit(scores, group)
    return choose(scores, group)


def _chooser(draw: Draw) -> Chooser:
    sampling = draw.sampling
    if sampling.greedy:
        return greedy
    return filtered if sampling.top_k or sampling.top_p < 1.0 else free


def _asked(draws: Sequence[Draw]) -> list[int]:
    return [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None]


def _scores(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], tokens: Tensor) -> Scores | None:
    asked = _asked(draws)
    if not asked:
        return None
    most = max(draws[i].sampling.logprobs or 0 for i in asked)
    picked = tokens if len(asked) == len(draws) else tokens.index_select(0, torch.tensor(asked, device=tokens.device))
    return score(_rows(logits, [rows[i] for i in asked], copy=False), picked, most)


def _rows(logits: Tensor, rows: list[int], *, copy: bool) -> Tensor:
    if rows == list(range(len(logits))):
        return logits.clone() if copy else logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))

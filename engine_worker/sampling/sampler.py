"""From logits to tokens. Draws that need the same work go together, so an odd one costs its own work only."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine_worker.sampling.choose import filtered, free, greedy
from engine_worker.sampling.edits import edit, edits
from engine_worker.sampling.logprobs import logprobs
from engine_worker.step import Draw, Drawn
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.wire import TokenLogprob

Chooser = Callable[[Tensor, Sequence[Draw]], tuple[Tensor, Tensor]]

NOTHING = Fault(
    ErrorCode.NOTHING_TO_SAMPLE.name, "no token can be sampled: bans leave none, or the model's logits are not numbers"
)


def sample(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
    """Logits [R, vocab] float32, left as they are; `rows`: the row of each draw. One result per draw, in order."""
    groups: dict[tuple[Chooser, bool], list[int]] = defaultdict(list)
    for i, draw in enumerate(draws):
        groups[_chooser(draw), edits(draw)].append(i)
    results = [Drawn(0, fault=NOTHING)] * len(draws)
    for (choose, edited), members in groups.items():
        group = [draws[i] for i in members]
        scores = _rows(logits, [rows[i] for i in members], copy=edited)
        if edited:
            edit(scores, group)
        tokens, valid = choose(scores, group)
        for i, token, good in zip(members, tokens.tolist(), valid.tolist(), strict=True):
            if good:
                results[i] = Drawn(token)
    return _with_logprobs(logits, rows, draws, results)


def _chooser(draw: Draw) -> Chooser:
    sampling = draw.sampling
    if sampling.greedy:
        return greedy
    return filtered if sampling.top_k or sampling.top_p < 1.0 else free


def _with_logprobs(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], results: list[Drawn]) -> list[Drawn]:
    """Logprobs for the draws that ask for them."""
    members = [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None and results[i].fault is None]
    if not members:
        return results
    tokens = torch.tensor([results[i].token for i in members], device=logits.device)
    wanted = [draws[i].sampling.logprobs or 0 for i in members]
    found = logprobs(_rows(logits, [rows[i] for i in members], copy=False), tokens, wanted)
    by_draw: dict[int, TokenLogprob] = dict(zip(members, found, strict=True))
    return [Drawn(drawn.token, by_draw.get(i), drawn.fault) for i, drawn in enumerate(results)]


def _rows(logits: Tensor, rows: list[int], *, copy: bool) -> Tensor:
    if rows == list(range(len(logits))):
        return logits.clone() if copy else logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))

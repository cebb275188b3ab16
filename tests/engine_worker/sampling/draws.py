"""Draws with as little said as possible."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine_worker.runner.transfer import send
from engine_worker.sampling.choose import Chosen, Filtered
from engine_worker.sampling.gumbel_max import Race, by_torch
from engine_worker.sampling.logit_edits import Edits
from engine_worker.sampling.sampler import Plan, Sampled, sample
from engine_worker.step import Draw, Drawn
from sluice.ring.params import SamplingParams


def draw(
    *,
    sequence: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **sampling: object,
) -> Draw:
    return Draw(SamplingParams(**sampling), sequence, position, prompt, output, banned)


NOBODY: Mapping[int, int] = {}


def sampled(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
    """As plain data."""
    return tensors(logits, rows, draws).results(draws)


def tensors(
    logits: Tensor,
    rows: Sequence[int],
    draws: Sequence[Draw],
    follows: Mapping[int, int] = NOBODY,
    before: Tensor | None = None,
    *,
    widen: bool = True,
    race: Race = by_torch,
) -> Sampled:
    """As they come."""
    plan = Plan.of(draws, rows, *logits.shape, follows)
    return sample(logits, send(plan, logits.device), before, widen=widen, race=race)


def edit(
    scores: Tensor, draws: Sequence[Draw], follows: Mapping[int, int] = NOBODY, before: Tensor | None = None
) -> None:
    """In place."""
    edits = Edits.of(draws, scores.shape[1], follows)
    send(edits, torch.device("cpu")).apply(scores, before)


def filtered(scores: Tensor, draws: Sequence[Draw], *, widen: bool = True) -> Chosen:
    """Whatever the draws ask for."""
    return send(Filtered.of(draws), scores.device)(scores, widen=widen)

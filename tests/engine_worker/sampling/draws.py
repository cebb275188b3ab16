"""Helpers that build draws from few arguments, and sample them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine_worker.runner.batch import to_device
from engine_worker.sampling.choose import TORCH, Chosen, Filtered, SamplingKernels
from engine_worker.sampling.logit_edits import DeviceEdits, HostEdits, LogitEdits
from engine_worker.sampling.logit_rules import StepRules, build_logit_rules
from engine_worker.sampling.sampler import Sampled, SamplingPlan, sample
from engine_worker.step import Draw, Drawn, Proposal
from sluice.wire.params import SamplingParams


def draw(
    *,
    sequence: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    candidates: int = 0,
    proposal: Proposal | None = None,
    **sampling: object,
) -> Draw:
    params = SamplingParams(**sampling)
    (rules,) = build_logit_rules(params, prompt)
    return Draw(params, sequence, position, output, rules, banned, candidates=candidates, proposal=proposal)


NO_FOLLOWS: Mapping[int, int] = {}


def sampled(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
    """Sample, and return plain data."""
    return tensors(logits, rows, draws).results(draws)


def tensors(
    logits: Tensor,
    rows: Sequence[int],
    draws: Sequence[Draw],
    follows: Mapping[int, int] = NO_FOLLOWS,
    before: Sequence[int] | None = None,
    *,
    widen: bool = True,
    kernels: SamplingKernels = TORCH,
) -> Sampled:
    """Sample, and return tensors."""
    plan = SamplingPlan.of(draws, rows, *logits.shape, follows)
    results = plan.run_rules(logits, before)
    return sample(logits, to_device(plan, logits.device), results, widen=widen, kernels=kernels)


def edit(
    scores: Tensor, draws: Sequence[Draw], follows: Mapping[int, int] = NO_FOLLOWS, before: Sequence[int] | None = None
) -> None:
    """Apply all edits of the draws in place; edits on the host and on a device must agree."""
    size = scores.shape[1]
    static = LogitEdits.of(draws, size)
    if static is not None:
        static.apply(scores)
    rules = StepRules.of(draws, follows)
    if rules is not None:
        with rules.advanced(before) as rows:
            pass
        on_device = scores.clone()
        DeviceEdits.of(rows, None, size).apply(on_device)
        HostEdits(rows, None).apply(scores)
        assert torch.equal(scores, on_device)


def filtered(scores: Tensor, draws: Sequence[Draw], *, widen: bool = True) -> Chosen:
    """Choose tokens with the filters of the draws."""
    return to_device(Filtered.of(draws), scores.device)(scores, widen=widen)

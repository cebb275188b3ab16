"""Draws with logits processors, and what they sample."""

from msgspec.structs import replace

from engine_worker.sampling.logit_rules import build_logit_rules
from engine_worker.sampling.processors import Processing
from engine_worker.sampling.sampler import SamplingPlan, sample
from engine_worker.step import Draw, Drawn
from sluice.wire.params import SamplingParams
from sluice.wire.requests import Extras
from tests.fakes.engine import spec_of

VOCAB = 50


def greedy(names=(), prompt=(1, 2), output=(), n=1, **sampling) -> list[Draw]:
    """A draw per sequence of a request."""
    params = SamplingParams(temperature=0.0, logits_processors=tuple(names), **sampling)
    spec = replace(spec_of(list(prompt), n=n), sampling=params, name="job", extras=Extras(client_id=7))
    rules_of = build_logit_rules(params, spec.prompt, Processing.of(spec))
    return [Draw(params, i, len(output), list(output), rules) for i, rules in enumerate(rules_of)]


def run(logits, draws, rows, processors, follows=(), before=None) -> list[Drawn]:
    plan = SamplingPlan.of(draws, rows, *logits.shape, dict(follows))
    applied = plan.run_rules(logits, before, processors)
    results = sample(logits, plan, applied).results(draws)
    return [Drawn(0, fault=applied.faults[i]) if i in applied.faults else each for i, each in enumerate(results)]


def faults(results: list[Drawn]) -> list[str | None]:
    """The message of each draw's fault."""
    return [drawn.fault and drawn.fault.message for drawn in results]

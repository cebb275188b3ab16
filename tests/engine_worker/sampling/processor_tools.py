"""Draws with logits processors, and what they sample."""

from msgspec.structs import replace

from engine_worker.sampling.program import Processing, build_programs
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
    programs = build_programs(params, spec.prompt, Processing.of(spec))
    return [Draw(params, i, len(output), list(output), program) for i, program in enumerate(programs)]


def run(logits, draws, rows, processors, follows=(), before=None) -> list[Drawn]:
    plan = SamplingPlan.of(draws, rows, *logits.shape, dict(follows))
    programs = plan.run_programs(logits, before, processors)
    results = sample(logits, plan, programs).results(draws)
    return [Drawn(0, fault=programs.faults[i]) if i in programs.faults else each for i, each in enumerate(results)]


def faults(results: list[Drawn]) -> list[str | None]:
    """The message of each draw's fault."""
    return [drawn.fault and drawn.fault.message for drawn in results]

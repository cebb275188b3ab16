"""Prompts that are visited again and do not all fit the device's pool: with a tier in host memory and without."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.engine_load import Configured, EngineAsk, EngineLoad, EngineRun
from bench.load import System, Trace
from bench.prompts import python_prompts
from bench.rounds import Step, interleave
from bench.systems.engine_alone import engine_alone


class Plan(msgspec.Struct, frozen=True):
    """One engine, whose pool is small."""

    model: Path
    pool_tokens: int
    host_tokens: int
    """Room in host memory."""
    bytes_per_token: int
    prompt_tokens: int
    output_tokens: int
    working_sets: list[float]
    """Tokens of all prompts together, in pools."""
    visits: int
    """Of each prompt, after the first, in the same order: what was used longest ago is wanted next."""
    repeats: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return 2 * len(self.working_sets) * (1 + self.repeats)

    def load(self, working_set: float) -> EngineLoad:
        """One prompt after the other."""
        prompts = python_prompts(self.model, self.prompts(working_set), self.prompt_tokens)
        return EngineLoad([EngineAsk(prompt, self.output_tokens) for prompt in prompts * (1 + self.visits)], 1)

    def prompts(self, working_set: float) -> int:
        """Different ones."""
        return round(working_set * self.pool_tokens / (self.prompt_tokens + self.output_tokens))


class Revisits(msgspec.Struct, frozen=True):
    """Every visit but the first of each prompt."""

    prompt_tokens: int
    """Over all of them, in one round."""
    recomputed_tokens: int
    """Of these."""
    first_token_p50: float
    """Milliseconds."""
    first_token_p99: float
    times: list[float]
    """First tokens of one round, in milliseconds, in order of size."""


class Point(msgspec.Struct, frozen=True):
    """One working set."""

    working_set: float
    prompts: int
    device: Revisits
    host: Revisits
    """With the host tier."""
    same: int
    """Outputs that are equal with and without."""
    outputs: int
    saved: float
    """Share of the recomputed tokens that the host tier saves; 0 where there were none."""


class Result(msgspec.Struct, frozen=True):
    """All working sets."""

    pool_tokens: int
    host_tokens: int
    prompt_tokens: int
    visits: int
    repeats: int
    points: list[Point]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """A new engine with empty caches for each run."""
    settings = {"kv_cache_tokens": plan.pool_tokens, "kv_host_memory": plan.host_tokens * plan.bytes_per_token}
    with engine_alone(plan.model, {**plan.engine, **settings}, logs) as engine:
        points = [_point(engine, plan, working_set, step) for working_set in plan.working_sets]
    return Result(plan.pool_tokens, plan.host_tokens, plan.prompt_tokens, plan.visits, plan.repeats, points)


def _point(engine: System[EngineRun], plan: Plan, working_set: float, step: Step) -> Point:
    load = plan.load(working_set)
    loads = [
        (Configured(f"{working_set:g} pools, {name}", engine, settings), load)
        for name, settings in (("device alone", {"kv_host_memory": 0}), ("with host tier", {}))
    ]
    without, tiered = interleave(loads, plan.repeats, step)
    prompts = plan.prompts(working_set)
    device, host = (_revisits(runs, prompts, plan) for runs in (without, tiered))
    pairs = [pair for a, b in zip(without, tiered, strict=True) for pair in zip(a.traces, b.traces, strict=True)]
    saved = 1 - host.recomputed_tokens / device.recomputed_tokens if device.recomputed_tokens else 0.0
    same = sum(a.tokens == b.tokens for a, b in pairs)
    return Point(working_set, prompts, device, host, same, len(pairs), saved)


def _revisits(runs: Sequence[EngineRun], prompts: int, plan: Plan) -> Revisits:
    visits = [list(run.traces[prompts:]) for run in runs]
    times = [sorted(map(_first_token, of_run)) for of_run in visits]
    return Revisits(
        plan.prompt_tokens * len(visits[0]),
        round(statistics.median(sum(plan.prompt_tokens - t.cached_tokens for t in of_run) for of_run in visits)),
        statistics.median(statistics.median(of_run) for of_run in times),
        statistics.median(statistics.quantiles(of_run, n=100, method="inclusive")[98] for of_run in times),
        times[0],
    )


def _first_token(trace: Trace) -> float:
    return 1000 * (trace.arrivals[0] - trace.submitted)

"""A system prompt that comes again and again between floods of other prompts, kept by priority and not."""

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
from sluice.ring.params import RangeRetention, RetentionParams

PRIORITY = 100
PROMPT_TOKENS = 256
"""Of the prompts of a flood."""


class Plan(msgspec.Struct, frozen=True):
    """One engine, whose pool is small."""

    model: Path
    pool_tokens: int
    system_tokens: int
    question_tokens: int
    floods: list[float]
    """Tokens that come between two visits, in pools."""
    visits: int
    """After the first, while the priority holds."""
    seconds: float
    """For which it holds."""
    repeats: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return 2 * len(self.floods) * (1 + self.repeats)

    def prompts(self, flood: float) -> int:
        """In a flood."""
        return round(flood * self.pool_tokens / PROMPT_TOKENS)

    def load(self, flood: float, retention: RetentionParams) -> EngineLoad:
        """A visit, and then flood and visit again and again. Before the last flood the priority's time passes."""
        system, *questions = self._visits()
        count = self.prompts(flood)
        others = iter(python_prompts(self.model, 1 + count * len(questions), PROMPT_TOKENS)[1:])
        asks: list[EngineAsk] = []
        for i, question in enumerate(questions):
            if i:
                passed = self.seconds + 1 if i == len(questions) - 1 else 0.0
                asks += [EngineAsk(next(others), 1, passed=0.0 if j else passed) for j in range(count)]
            asks.append(EngineAsk(system + question, 1, retention=retention))
        return EngineLoad(asks, 1)

    def visited(self, run: EngineRun, flood: float) -> list[Trace]:
        """The visits, but for the first."""
        return list(run.traces[:: self.prompts(flood) + 1])[1:]

    def _visits(self) -> list[list[int]]:
        """The system prompt, and what is asked at each visit."""
        (system,) = python_prompts(self.model, 1, self.system_tokens)
        return [system, *python_prompts(self.model, self.visits + 2, self.question_tokens)]


class Hits(msgspec.Struct, frozen=True):
    """How much of the system prompt was found again, from 0 to 1, and the first token of a visit in milliseconds."""

    before: float
    """While the priority held."""
    after: float
    """When its time had passed."""
    first_token_before: float
    first_token_after: float


class Point(msgspec.Struct, frozen=True):
    """One size of flood."""

    flood: float
    plain: Hits
    kept: Hits


class Result(msgspec.Struct, frozen=True):
    """All sizes."""

    pool_tokens: int
    system_tokens: int
    visits: int
    seconds: float
    repeats: int
    points: list[Point]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """A new engine with an empty cache for each run."""
    kept = RetentionParams((RangeRetention(0, plan.system_tokens, PRIORITY, plan.seconds),))
    settings = {"max_tokens_per_step": PROMPT_TOKENS, "kv_cache_tokens": plan.pool_tokens}
    with engine_alone(plan.model, {**plan.engine, **settings}, logs) as engine:
        points = [_point(engine, plan, flood, kept, step) for flood in plan.floods]
    return Result(plan.pool_tokens, plan.system_tokens, plan.visits, plan.seconds, plan.repeats, points)


def _point(engine: System[EngineRun], plan: Plan, flood: float, kept: RetentionParams, step: Step) -> Point:
    loads = [
        (Configured(f"flood of {flood:g} pools, {name}", engine, {}), plan.load(flood, retention))
        for name, retention in (("plain", RetentionParams()), ("kept", kept))
    ]
    found = [_hits(runs, plan, flood) for runs in interleave(loads, plan.repeats, step)]
    return Point(flood, *found)


def _hits(runs: Sequence[EngineRun], plan: Plan, flood: float) -> Hits:
    visits = [plan.visited(run, flood) for run in runs]
    before = [trace for of_run in visits for trace in of_run[:-1]]
    after = [of_run[-1] for of_run in visits]
    return Hits(_share(before, plan), _share(after, plan), _first_token(before), _first_token(after))


def _share(visits: Sequence[Trace], plan: Plan) -> float:
    return statistics.mean(trace.cached_tokens / plan.system_tokens for trace in visits)


def _first_token(visits: Sequence[Trace]) -> float:
    return 1000 * statistics.median(trace.arrivals[0] - trace.submitted for trace in visits)

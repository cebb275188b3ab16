"""Who shares a step with whom: in-flight batching under both of its policies, and static batches, on mixed outputs."""

import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench.engine_load import Configured, EngineAsk, EngineLoad, EngineRun
from bench.load import System
from bench.prompts import python_prompts
from bench.rounds import Step, interleave
from bench.stats import Figures, figures, ratio
from bench.systems.engine_alone import engine_alone

POLICIES = {
    "max_utilization": "in flight, MAX_UTILIZATION",
    "guaranteed_no_evict": "in flight, GUARANTEED_NO_EVICT",
    "static_batch": "STATIC_BATCH",
}
BASE = "static_batch"
GROUP = 8
"""Requests of which one is long, where few are."""
SHORT = 4
"""How many times the shortest a short one is at most."""


class Mix(msgspec.Struct, frozen=True):
    """Output lengths, and how many run at once."""

    title: str
    few_long: bool
    """One in eight as long as may be, the others short; else spread evenly."""
    batch: int
    pool: int | None = None
    """Tokens of the KV cache. None: all that the engine has, which is enough for everybody."""
    max_tokens: int | None = None
    """What each request asks for, though its output ends where the mix says. None: just that."""

    @property
    def settings(self) -> dict[str, Any]:
        """Of its engine."""
        return {"max_batch_size": self.batch} | ({} if self.pool is None else {"kv_cache_tokens": self.pool})

    def ask(self, prompt: list[int], length: int) -> EngineAsk:
        """A request with an output of this length."""
        if self.max_tokens is None:
            return EngineAsk(prompt, length)
        return EngineAsk(prompt, self.max_tokens, ends_after=length)

    def lengths(self, count: int, shortest: int, longest: int) -> list[int]:
        """The same ones each time."""
        draws = random.Random(0)
        if not self.few_long:
            return [draws.randint(shortest, longest) for _ in range(count)]
        found: list[int] = []
        for _ in range(0, count, GROUP):
            long = draws.randrange(GROUP)
            found += [longest if i == long else draws.randint(shortest, SHORT * shortest) for i in range(GROUP)]
        return found[:count]


class Plan(msgspec.Struct, frozen=True):
    """Requests that all come at once."""

    model: Path
    requests: int
    prompt_tokens: int
    shortest: int
    longest: int
    mixes: list[Mix]
    repeats: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return len(self.mixes) * len(POLICIES) * (1 + self.repeats)

    def load(self, mix: Mix) -> EngineLoad:
        """All there from the start; the engine decides who runs."""
        prompts = python_prompts(self.model, self.requests, self.prompt_tokens)
        lengths = mix.lengths(self.requests, self.shortest, self.longest)
        asks = [mix.ask(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        return EngineLoad(asks, self.requests)


class Life(msgspec.Struct, frozen=True):
    """One request, in seconds since the load began."""

    first_token: float
    last_token: float


class Entry(msgspec.Struct, frozen=True):
    """One policy under one mix."""

    policy: str
    figures: Figures
    ratio: float
    """Tokens per second by those of static batches: median of the rounds' ratios."""
    steps: int
    """That the requests took: the same in every round."""
    step_milliseconds: float
    lives: list[Life]
    """Of the round in the middle."""
    longest_pause: float | None = None
    """Milliseconds between two tokens of one request, at most; median of the rounds. Older results have none."""


class Outcome(msgspec.Struct, frozen=True):
    """All policies under one mix."""

    mix: Mix
    tokens: int
    entries: list[Entry]

    def of(self, policy: str) -> Entry:
        """One of them."""
        return next(entry for entry in self.entries if entry.policy == policy)


class Result(msgspec.Struct, frozen=True):
    """All mixes."""

    requests: int
    prompt_tokens: int
    shortest: int
    longest: int
    outcomes: list[Outcome]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """One process, with a new engine around the same model for each run."""
    with engine_alone(plan.model, plan.engine, logs) as engine:
        outcomes = [_outcome(engine, plan, mix, step) for mix in plan.mixes]
    return Result(plan.requests, plan.prompt_tokens, plan.shortest, plan.longest, outcomes)


def _outcome(engine: System[EngineRun], plan: Plan, mix: Mix, step: Step) -> Outcome:
    load = plan.load(mix)
    systems = [
        Configured(name, engine, {"capacity_scheduler_policy": policy, **mix.settings})
        for policy, name in POLICIES.items()
    ]
    runs = dict(zip(POLICIES, interleave([(system, load) for system in systems], plan.repeats, step), strict=True))
    entries = [
        Entry(
            policy,
            figures(own),
            ratio(own, runs[BASE]),
            own[0].steps,
            statistics.median(1000 * run.seconds / run.steps for run in own),
            _lives(own),
            statistics.median(_longest_pause(run) for run in own),
        )
        for policy, own in runs.items()
    ]
    return Outcome(mix, load.tokens, entries)


def _longest_pause(run: EngineRun) -> float:
    pauses = (after - before for trace in run.traces for before, after in pairwise(trace.arrivals))
    return 1000 * max(pauses, default=0.0)


def _lives(runs: Sequence[EngineRun]) -> list[Life]:
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    return [Life(trace.arrivals[0], trace.arrivals[-1]) for trace in middle.traces]

"""In-flight against static batching, through the ring, on outputs of mixed length."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.load import Ask, Load, Run
from bench.prompts import python_prompts
from bench.rounds import Step, interleave
from bench.stats import Figures, figures, ratio
from bench.systems.through_ring import through_ring


class Plan(msgspec.Struct, frozen=True):
    """Requests whose output lengths are drawn evenly from a range."""

    model: Path
    requests: int
    width: int
    """Sequences that run at once, at most."""
    prompt_tokens: int
    shortest: int
    longest: int
    repeats: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return 2 * (1 + self.repeats)

    def asks(self) -> list[Ask]:
        """The same ones each time."""
        lengths = random.Random(0)
        prompts = python_prompts(self.model, self.requests, self.prompt_tokens)
        return [Ask(prompt, lengths.randint(self.shortest, self.longest)) for prompt in prompts]


class Life(msgspec.Struct, frozen=True):
    """One request, in seconds since the load began."""

    submitted: float
    first_token: float
    last_token: float


class Result(msgspec.Struct, frozen=True):
    """Both ways of batching, and how the lives of the requests lay in the round in the middle."""

    requests: int
    width: int
    shortest: int
    longest: int
    in_flight: Figures
    static: Figures
    ratio: float
    """Tokens per second in flight by static: median of the rounds' ratios."""
    in_flight_lives: list[Life]
    static_lives: list[Life]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """One ring serves both; what differs is when requests are handed in."""
    free = Load(plan.asks(), plan.width)
    grouped = msgspec.structs.replace(free, static=True, salt="static")
    with through_ring(plan.model, plan.engine, logs) as ring:
        in_flight, static = interleave([(ring, free), (ring, grouped)], plan.repeats, step)
    return Result(
        plan.requests,
        plan.width,
        plan.shortest,
        plan.longest,
        figures(in_flight),
        figures(static),
        ratio(in_flight, static),
        _lives(in_flight),
        _lives(static),
    )


def _lives(runs: list[Run]) -> list[Life]:
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    return [Life(trace.submitted, trace.arrivals[0], trace.arrivals[-1]) for trace in middle.traces]

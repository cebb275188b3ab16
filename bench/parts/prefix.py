"""First-token time through the ring when nine tenths of the prompt are in the prefix cache, and when nothing is."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.load import Ask, Load, Run, System, Trace
from bench.prompts import python_prompts
from bench.rounds import Step
from bench.systems.through_ring import through_ring


class Plan(msgspec.Struct, frozen=True):
    """Prompt lengths to try."""

    model: Path
    prompt_tokens: list[int]
    share: float
    """Of the prompt that the cache has seen before."""
    repeats: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Pairs of runs to come."""
        return len(self.prompt_tokens) * (1 + self.repeats)


class Point(msgspec.Struct, frozen=True):
    """One prompt length; medians, in milliseconds."""

    prompt_tokens: int
    cached_tokens: int
    """As the server told: whole blocks only."""
    cold: float
    cached: float
    ratio: float
    """Cold by cached: median of the rounds' ratios."""


class Result(msgspec.Struct, frozen=True):
    """All prompt lengths."""

    share: float
    repeats: int
    points: list[Point]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """One stream at a time."""
    with through_ring(plan.model, plan.engine, logs) as ring:
        points = [_point(ring, plan, tokens, step) for tokens in plan.prompt_tokens]
    return Result(plan.share, plan.repeats, points)


def _point(ring: System[Run], plan: Plan, tokens: int, step: Step) -> Point:
    prompts = python_prompts(plan.model, plan.repeats + 1, tokens)
    pairs = []
    for round_, prompt in enumerate(prompts):
        cold = _one(ring, prompt, f"cold-{tokens}-{round_}")
        _one(ring, prompt[: int(tokens * plan.share)], f"cached-{tokens}-{round_}")
        pairs.append((cold, _one(ring, prompt, f"cached-{tokens}-{round_}")))
        step(f"{tokens} prompt tokens, round {round_}")
    counted = [(_first_token(cold), _first_token(cached)) for cold, cached in pairs[1:]]
    return Point(
        tokens,
        min(cached.cached_tokens for _, cached in pairs),
        statistics.median(cold for cold, _ in counted),
        statistics.median(cached for _, cached in counted),
        statistics.median(cold / cached for cold, cached in counted),
    )


def _one(ring: System[Run], prompt: list[int], salt: str) -> Trace:
    return ring.run(Load([Ask(prompt, 1)], width=1, salt=salt)).traces[0]


def _first_token(trace: Trace) -> float:
    return 1000 * (trace.arrivals[0] - trace.submitted)

"""A long prompt comes while others generate and short prompts follow it: who waits for it, chunked and in one piece."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.engine_load import Configured, EngineAsk, EngineLoad, EngineRun
from bench.load import System, Trace
from bench.prompts import python_prompts
from bench.rounds import Step, interleave
from bench.systems.engine_alone import engine_alone

MODES: Mapping[str, Mapping[str, Any]] = {
    "in one piece": {"chunked_context": False},
    "chunked, first come first served": {"context_chunking_policy": "first_come_first_served"},
    "chunked, equal progress": {"context_chunking_policy": "equal_progress"},
}
BASE = "in one piece"


class Plan(msgspec.Struct, frozen=True):
    """Who runs, what comes, and who follows."""

    model: Path
    streams: int
    stream_tokens: int
    context_tokens: int
    """Of the long prompt."""
    newcomers: int
    newcomer_tokens: int
    """Of their prompts."""
    output_tokens: int
    """Of long prompt and newcomers."""
    tokens_per_step: int
    repeats: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return len(MODES) * (1 + self.repeats) + 1

    def load(self, seconds: float) -> EngineLoad:
        """The long prompt comes when all streams run, the newcomers evenly within the `seconds` after it."""
        streams = python_prompts(self.model, self.streams, 32)
        (long,) = python_prompts(self.model, 1, self.context_tokens)
        short = python_prompts(self.model, self.newcomers + 1, self.newcomer_tokens)[1:]
        pause = seconds / self.newcomers
        return EngineLoad(
            [
                *(EngineAsk(prompt, self.stream_tokens) for prompt in streams),
                EngineAsk(long, self.output_tokens, 0.0),
                *(EngineAsk(prompt, self.output_tokens, (i + 0.5) * pause) for i, prompt in enumerate(short)),
            ],
            self.streams,
        )


class Arrival(msgspec.Struct, frozen=True):
    """When a request came, and when its first token did."""

    came: float
    first_token: float


class Episode(msgspec.Struct, frozen=True):
    """One run, in seconds since the long prompt came."""

    streams: list[list[float]]
    """When the tokens of each came."""
    long: Arrival
    newcomers: list[Arrival]


class Entry(msgspec.Struct, frozen=True):
    """One mode; milliseconds. Percentiles are over all rounds."""

    mode: str
    newcomer_p50: float
    newcomer_p99: float
    stream_p50: float
    """Between two tokens of a stream while the long prompt is computed."""
    stream_p99: float
    long: float
    """First token of the long prompt: median of the rounds."""
    newcomers: int
    """Behind the percentiles."""
    episode: Episode
    """The round in the middle."""


class Result(msgspec.Struct, frozen=True):
    """All modes."""

    streams: int
    context_tokens: int
    newcomer_tokens: int
    tokens_per_step: int
    entries: list[Entry]

    def of(self, mode: str) -> Entry:
        """One of them."""
        return next(entry for entry in self.entries if entry.mode == mode)


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """How long the long prompt takes in one piece is found out first: the newcomers come within that time."""
    common = {"max_tokens_per_step": plan.tokens_per_step, "block_reuse": False}
    with engine_alone(plan.model, plan.engine, logs) as engine:
        systems = [Configured(mode, engine, {**common, **settings}) for mode, settings in MODES.items()]
        seconds = _context_seconds(systems[0], plan)
        step("the long prompt alone")
        load = plan.load(seconds)
        runs = interleave([(system, load) for system in systems], plan.repeats, step)
    entries = [
        _entry(system.name, [_episode(run, plan) for run in own]) for system, own in zip(systems, runs, strict=True)
    ]
    return Result(plan.streams, plan.context_tokens, plan.newcomer_tokens, plan.tokens_per_step, entries)


def _context_seconds(system: System[EngineRun], plan: Plan) -> float:
    prompts = python_prompts(plan.model, 2, plan.context_tokens)
    (*_, trace) = system.run(EngineLoad([EngineAsk(prompt, 1) for prompt in prompts], 1)).traces
    return trace.arrivals[0] - trace.submitted


def _episode(run: EngineRun, plan: Plan) -> Episode:
    streams, (long, *newcomers) = run.traces[: plan.streams], run.traces[plan.streams :]
    zero = long.submitted
    return Episode(
        [[at - zero for at in trace.arrivals] for trace in streams],
        _arrival(long, zero),
        [_arrival(trace, zero) for trace in newcomers],
    )


def _arrival(trace: Trace, zero: float) -> Arrival:
    return Arrival(trace.submitted - zero, trace.arrivals[0] - zero)


def _entry(mode: str, episodes: Sequence[Episode]) -> Entry:
    waits = [new.first_token - new.came for episode in episodes for new in episode.newcomers]
    gaps = [
        after - before
        for episode in episodes
        for stream in episode.streams
        for before, after in pairwise(stream)
        if after > 0 and before < episode.long.first_token
    ]
    return Entry(
        mode,
        *_percentiles(waits),
        *_percentiles(gaps),
        1000 * statistics.median(episode.long.first_token for episode in episodes),
        len(waits),
        sorted(episodes, key=lambda episode: episode.long.first_token)[len(episodes) // 2],
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99, in milliseconds."""
    return 1000 * float(np.percentile(seconds, 50)), 1000 * float(np.percentile(seconds, 99))

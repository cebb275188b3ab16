"""A long prompt arrives while streams generate, and short prompts follow: waiting times with and without chunking."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from matplotlib.axes import Axes
from msgspec.structs import replace

from bench.harness.load import Load, PlannedRequest, Run, System, Trace
from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, ORANGE, SOFT, frame, note
from bench.harness.tables import Table, number, numbers, short, table
from bench.harness.topic import Step, interleave
from sluice.loadgen.report import percentile

MODES: Mapping[str, Mapping[str, Any]] = {
    "in one piece": {"chunked_context": False},
    "chunked, first come first served": {"context_chunking_policy": "first_come_first_served"},
    "chunked, equal progress": {"context_chunking_policy": "equal_progress"},
}
BEFORE = 60.0
"""Milliseconds shown before the long prompt arrives."""


class LongPromptPlan(msgspec.Struct, frozen=True):
    streams: int = 8
    stream_tokens: int = 96
    context_tokens: int = 2000
    """Length of the long prompt: nearly the tiny model's whole context."""
    newcomers: int = 8
    newcomer_tokens: int = 16
    output_tokens: int = 4
    """Output tokens of the long prompt and of the newcomers."""
    tokens_per_step: int = 256
    repeats: int = 15

    def load(self, seconds: float) -> Load:
        """The long prompt arrives once all streams run, the newcomers evenly within the `seconds` after it."""
        streams = python_prompts(TINY, self.streams, 32)
        (long,) = python_prompts(TINY, 1, self.context_tokens)
        brief = python_prompts(TINY, self.newcomers + 1, self.newcomer_tokens)[1:]
        pause = seconds / self.newcomers
        requests = [PlannedRequest(prompt, self.stream_tokens) for prompt in streams]
        requests.append(PlannedRequest(long, self.output_tokens, 0.0))
        requests += (PlannedRequest(prompt, self.output_tokens, (i + 0.5) * pause) for i, prompt in enumerate(brief))
        return Load(requests, self.streams)


class Arrival(msgspec.Struct, frozen=True):
    came: float
    first_token: float


class Episode(msgspec.Struct, frozen=True):
    streams: list[list[float]]
    long: Arrival
    newcomers: list[Arrival]


class ModeEntry(msgspec.Struct, frozen=True):
    """Waits with one mode, in milliseconds. Percentiles are over all rounds."""

    mode: str
    newcomer_p50: float
    newcomer_p99: float
    stream_p50: float
    """Between two tokens of a stream while the long prompt is computed."""
    stream_p99: float
    long: float
    newcomers: int
    episode: Episode


def measure(engine: System, plan: LongPromptPlan, step: Step) -> list[ModeEntry]:
    """First measures the long prompt alone, in one piece; the newcomers arrive within that time."""
    common = {"max_tokens_per_step": plan.tokens_per_step, "block_reuse": False}
    settings = {mode: {**common, **own} for mode, own in MODES.items()}
    load = plan.load(_context_seconds(engine, plan, settings["in one piece"]))
    step("the long prompt alone")
    sides = {mode: (engine, replace(load, settings=own)) for mode, own in settings.items()}
    runs = interleave(sides, plan.repeats, step)
    return [_entry(mode, [_episode(run, plan) for run in own]) for mode, own in zip(MODES, runs, strict=True)]


def _context_seconds(engine: System, plan: LongPromptPlan, settings: dict[str, Any]) -> float:
    prompts = python_prompts(TINY, 2, plan.context_tokens)
    # The first of the two warms up.
    (*_, trace) = engine.run(Load([PlannedRequest(prompt, 1) for prompt in prompts], 1, settings=settings)).traces
    return trace.arrivals[0] - trace.submitted


def _episode(run: Run, plan: LongPromptPlan) -> Episode:
    streams, (long, *newcomers) = run.traces[: plan.streams], run.traces[plan.streams :]
    zero = long.submitted

    def arrival(trace: Trace) -> Arrival:
        return Arrival(trace.submitted - zero, trace.arrivals[0] - zero)

    tokens = [[at - zero for at in trace.arrivals] for trace in streams]
    return Episode(tokens, arrival(long), [arrival(trace) for trace in newcomers])


def _entry(mode: str, episodes: Sequence[Episode]) -> ModeEntry:
    waits = [new.first_token - new.came for episode in episodes for new in episode.newcomers]
    gaps = [
        after - before
        for episode in episodes
        for stream in episode.streams
        for before, after in pairwise(stream)
        if after > 0 and before < episode.long.first_token
    ]
    newcomer, stream = ([1000 * percentile(samples, percent) for percent in (50, 99)] for samples in (waits, gaps))
    long = 1000 * statistics.median(episode.long.first_token for episode in episodes)
    middle = sorted(episodes, key=lambda episode: episode.long.first_token)[len(episodes) // 2]
    return ModeEntry(mode, newcomer[0], newcomer[1], stream[0], stream[1], long, len(waits), middle)


def answers(entries: Sequence[ModeEntry]) -> list[str]:
    whole, ordered, equal = entries
    return [
        f"The p99 time to first token of newcomers is **{whole.newcomer_p99 / equal.newcomer_p99:.1f}×** shorter with "
        f"equal progress than in one piece ({number(equal.newcomer_p99)} instead of {number(whole.newcomer_p99)} ms).",
        f"The p99 time between two tokens of a running stream is {number(ordered.stream_p99)} ms with chunking instead "
        f"of {number(whole.stream_p99)} ms, **{whole.stream_p99 / ordered.stream_p99:.1f}×** less.",
    ]


def waits(entries: Sequence[ModeEntry]) -> Table:
    rows = (
        f"{entry.mode} | {numbers(entry.newcomer_p50, entry.newcomer_p99)} | "
        f"{numbers(entry.stream_p50, entry.stream_p99)} | {number(entry.long)} | {entry.newcomers}"
        for entry in entries
    )
    cells = "newcomers: first token p50 · p99, ms | streams: inter-token p50 · p99, ms"
    return table(f"the long prompt | {cells} | long prompt: first token, ms | newcomers measured", rows)


def draw(column: Sequence[Axes], entries: Sequence[ModeEntry]) -> None:
    end = max(new.first_token for entry in entries for new in [entry.episode.long, *entry.episode.newcomers])
    for axes, entry in zip(column, entries, strict=True):
        _draw_episode(axes, entry.episode)
        axes.set_xlim(-BEFORE, 1080 * end)
        frame(axes, entry.mode.capitalize(), x="milliseconds since the long prompt arrived")


def _draw_episode(axes: Axes, episode: Episode) -> None:
    for place, stream in enumerate(episode.streams):
        axes.plot([1000 * at for at in stream], [place] * len(stream), "|", color=SOFT, markersize=6, mew=1.1)
    at, long = len(episode.streams), 1000 * episode.long.first_token
    axes.barh(at, long, 0.8, color=ORANGE)
    note(axes, f"{short(long)} ms", (long, at), (4, 0), ha="left", va="center")
    for place, new in enumerate(episode.newcomers, at + 1):
        axes.barh(place, 1000 * (new.first_token - new.came), 0.55, 1000 * new.came, color=BLUE)
    axes.invert_yaxis()
    axes.set_yticks([])

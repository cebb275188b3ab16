"""Scheduling policies: in-flight and static batching with mixed output lengths, and a long prompt with and without
chunking."""

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec.structs import asdict, replace

from bench.harness.load import Load, PlannedRequest, Run, System
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import Figures, figures, ratio
from bench.harness.style import BLUE, FAINT, ORANGE, TEAL, canvas, frame
from bench.harness.tables import Section, Table, number, short, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave, speed_cells
from bench.systems.engine_alone import engine_alone
from bench.topics import long_prompt

POLICIES = {
    "max_utilization": "in flight, MAX_UTILIZATION",
    "guaranteed_no_evict": "in flight, GUARANTEED_NO_EVICT",
    "static_batch": "STATIC_BATCH",
}
BASE = "static_batch"
COLOURS = {"max_utilization": BLUE, "guaranteed_no_evict": TEAL, BASE: ORANGE}
GROUP = 8
"""One request in GROUP is long, if `few_long`."""
SHORT = 4  # Longest short output, in multiples of the shortest.


class Mix(msgspec.Struct, frozen=True):
    title: str
    few_long: bool
    """One request in eight has the longest output, the others have short ones. Otherwise lengths are distributed
    evenly."""
    batch: int
    pool: int | None = None
    """Tokens of the KV cache. None: the engine's whole cache, which is large enough for all requests."""
    max_tokens: int | None = None
    """max_tokens of each request, whose output ends earlier. None: exactly its output length."""

    def lengths(self, count: int, shortest: int, longest: int) -> list[int]:
        draws = random.Random(0)
        if not self.few_long:
            return [draws.randint(shortest, longest) for _ in range(count)]
        found: list[int] = []
        for _ in range(0, count, GROUP):
            long = draws.randrange(GROUP)
            found += [longest if i == long else draws.randint(shortest, SHORT * shortest) for i in range(GROUP)]
        return found[:count]


MIXES = (
    Mix("lengths spread evenly, 8 at a time", False, 8),
    Mix("one in eight is long, 8 at a time", True, 8),
    Mix("one in eight is long, 16 at a time", True, 16),
    Mix("spread, 16 at a time, cache of 1,536 tokens", False, 16, pool=1536),
    Mix("max_tokens unset, 16 at a time, cache of 4,096", False, 16, pool=4096, max_tokens=2016),
)


class PoliciesPlan(Plan, frozen=True):
    requests: int = 32
    prompt_tokens: int = 32
    shortest: int = 8
    longest: int = 256
    repeats: int = 3
    mixes: tuple[Mix, ...] = MIXES
    long: long_prompt.LongPromptPlan = long_prompt.LongPromptPlan()

    def load(self, mix: Mix) -> Load:
        """The load submits all requests together; the engine's scheduler decides which of them run."""
        prompts = python_prompts(TINY, self.requests, self.prompt_tokens)
        lengths = mix.lengths(self.requests, self.shortest, self.longest)
        requests = [PlannedRequest(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        if mix.max_tokens is not None:
            requests = [
                replace(request, max_tokens=mix.max_tokens, ends_after=request.max_tokens) for request in requests
            ]
        return Load(requests, self.requests)


class Life(msgspec.Struct, frozen=True):
    first_token: float
    last_token: float


class PolicyEntry(msgspec.Struct, frozen=True):
    policy: str
    figures: Figures
    ratio: float
    """Tokens per second divided by those of static batches: median of the rounds' ratios."""
    steps: int
    step_milliseconds: float
    lives: list[Life]
    longest_pause: float | None = None
    """Longest time between two tokens of one request, in ms: median of the rounds. None in older results."""


class Outcome(msgspec.Struct, frozen=True):
    mix: Mix
    tokens: int
    entries: list[PolicyEntry]


class PoliciesResult(PoliciesPlan, frozen=True, kw_only=True):
    outcomes: list[Outcome]
    modes: list[long_prompt.ModeEntry]


def measure(plan: PoliciesPlan, logs: Path, step: Step) -> PoliciesResult:
    with engine_alone(TINY, engine_settings(plan.threads), logs) as engine:
        outcomes = [_outcome(engine, plan, mix, step) for mix in plan.mixes]
        modes = long_prompt.measure(engine, plan.long, step)
    return PoliciesResult(**asdict(plan), outcomes=outcomes, modes=modes)


def _outcome(engine: System, plan: PoliciesPlan, mix: Mix, step: Step) -> Outcome:
    load = plan.load(mix)
    settings: dict[str, Any] = {"max_batch_size": mix.batch}
    if mix.pool is not None:
        settings["kv_cache_tokens"] = mix.pool
    sides = {
        name: (engine, replace(load, settings={"capacity_scheduler_policy": policy, **settings}))
        for policy, name in POLICIES.items()
    }
    runs = dict(zip(POLICIES, interleave(sides, plan.repeats, step), strict=True))
    return Outcome(mix, load.tokens, [_entry(policy, own, runs[BASE]) for policy, own in runs.items()])


def _entry(policy: str, runs: Sequence[Run], base: Sequence[Run]) -> PolicyEntry:
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    return PolicyEntry(
        policy,
        figures(runs),
        ratio(runs, base),
        runs[0].steps,
        statistics.median(1000 * run.seconds / run.steps for run in runs),
        [Life(trace.arrivals[0], trace.arrivals[-1]) for trace in middle.traces],
        statistics.median(_longest_pause(run) for run in runs),
    )


def _longest_pause(run: Run) -> float:
    pauses = (after - before for trace in run.traces for before, after in pairwise(trace.arrivals))
    return 1000 * max(pauses, default=0.0)


def section(result: PoliciesResult) -> Section:
    plan = result.long
    return Section(
        "Scheduling policies",
        f"*In-flight and static batches*: {result.requests} requests with {result.prompt_tokens} prompt tokens and "
        f"{result.shortest} to {result.longest} output tokens arrive together; the engine runs in process. *Steps* are "
        "exact, and equal to the gain on a device where the batch size does not change the duration of a step. A cache "
        "named in a title is too small for all running requests; with max_tokens unset a request may fill the model's "
        f"context, but it ends much earlier. *Chunked context*: a prompt of {plan.context_tokens:,} tokens arrives "
        f"while {plan.streams} streams generate; newcomers of {plan.newcomer_tokens} tokens arrive evenly within the "
        f"time that the long prompt takes in one piece. With chunking, a step computes at most {plan.tokens_per_step} "
        "tokens. Times of streams are those while the long prompt is computed.",
        [*map(_answer, result.outcomes), *long_prompt.answers(result.modes)],
        [*map(_table, result.outcomes), long_prompt.waits(result.modes)],
    )


def _answer(outcome: Outcome) -> str:
    packed, promised, static = outcome.entries
    title = outcome.mix.title.capitalize()
    if outcome.mix.pool is not None:
        return (
            f"{title}: MAX_UTILIZATION takes {packed.steps} steps, GUARANTEED_NO_EVICT {promised.steps} "
            f"(**{promised.steps / packed.steps:.2f}×**)."
        )
    return (
        f"{title}: in-flight batching has **{packed.ratio:.2f}×** the tokens/s of static batches, with {packed.steps} "
        f"steps instead of {static.steps} (**{static.steps / packed.steps:.2f}×** fewer)."
    )


def _table(outcome: Outcome) -> Table:
    return table(
        f"{outcome.mix.title}, {outcome.tokens:,} tokens | steps | ms per step | tokens/s (range) | ratio to static | "
        "first token p50 · p99, ms | inter-token p50 · p99, ms | longest pause, ms",
        (
            f"{POLICIES[entry.policy]} | {entry.steps} | {number(entry.step_milliseconds)} | "
            f"{speed_cells(entry.figures, f'**{entry.ratio:.2f}×**')} | {number(entry.longest_pause)}"
            for entry in outcome.entries
        ),
    )


def draw(result: PoliciesResult) -> Figure:
    figure, grid = canvas(
        (len(POLICIES), len(result.outcomes) + 1),
        (6 + 4.6 * len(result.outcomes), 7.6),
        "Scheduling policies",
        f"{result.requests} requests of {result.shortest} to {result.longest} output tokens: a bar is a request, a "
        "row a slot of the batch, a pale area an empty slot. Right: a long prompt (orange) with running streams "
        "(grey) and newcomers (blue), each until its first token.",
    )
    *batches, episodes = zip(*grid, strict=True)
    for column, outcome in zip(batches, result.outcomes, strict=True):
        end = max(life.last_token for entry in outcome.entries for life in entry.lives)
        for axes, entry in zip(column, outcome.entries, strict=True):
            _draw_lives(axes, entry.lives, outcome.mix.batch, COLOURS[entry.policy])
            axes.set_xlim(0, end * 1.02)
            rate = f"{short(entry.figures.tokens_per_second)} tokens/s ({entry.ratio:.2f}×)"
            mix = f"{outcome.mix.title}\n\n" if axes is column[0] else ""
            below = f"{entry.steps} steps of {short(entry.step_milliseconds)} ms"
            frame(axes, f"{mix}{entry.policy.upper()}: {rate}", below, x="seconds")
    long_prompt.draw(episodes, result.modes)
    return figure


def _draw_lives(axes: Axes, lives: Sequence[Life], places: int, colour: str) -> None:
    # Results contain no slots: each request is drawn in the slot that has been free longest.
    free_at = [0.0] * places
    axes.barh(range(places), max(life.last_token for life in lives), 0.7, color=FAINT, zorder=-1)
    for life in sorted(lives, key=lambda life: life.first_token):
        place = min(range(places), key=free_at.__getitem__)
        running = life.last_token - life.first_token
        axes.barh(place, running, 0.7, life.first_token, color=colour, edgecolor="white", lw=0.7)
        free_at[place] = life.last_token
    axes.invert_yaxis()
    axes.set_yticks([])


QUICK_MIXES = (
    Mix("one in eight is long, 4 at a time", True, 4),
    Mix("max_tokens unset, 4 at a time, cache of 512", True, 4, pool=512, max_tokens=256),
)
QUICK_PROMPT = long_prompt.LongPromptPlan(2, 16, 300, newcomers=2, tokens_per_step=64, repeats=1)
QUICK = PoliciesPlan(16, shortest=2, longest=16, repeats=1, mixes=QUICK_MIXES, long=QUICK_PROMPT)
TOPIC = Topic(PoliciesPlan(), QUICK, measure, PoliciesResult, section, draw)

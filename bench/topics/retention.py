"""A system prompt reused between floods of other prompts, with and without retention priority."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.load import Ask, Load, Run, System, Trace
from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, GREY, ORANGE, Series, bars, canvas, frame
from bench.harness.tables import Section, number, plural, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.systems.engine_alone import engine_alone
from sluice.ring.params import RangeRetention, RetentionParams

PRIORITY = 100
PROMPT_TOKENS = 256
"""Of each prompt of a flood."""


class RetentionPlan(Plan, frozen=True):
    pool_tokens: int = 4096
    system_tokens: int = 512
    question_tokens: int = 32
    floods: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    visits: int = 3
    seconds: float = 3600.0
    repeats: int = 1

    def prompts(self, flood: float) -> int:
        return round(flood * self.pool_tokens / PROMPT_TOKENS)

    def load(self, flood: float, retention: RetentionParams) -> Load:
        """Visits with a flood before each but the first. The priority expires before the last flood."""
        (system,) = python_prompts(TINY, 1, self.system_tokens)
        questions = python_prompts(TINY, self.visits + 2, self.question_tokens)
        count = self.prompts(flood)
        others = iter(python_prompts(TINY, 1 + count * len(questions), PROMPT_TOKENS)[1:])
        asks: list[Ask] = []
        for i, question in enumerate(questions):
            if i:
                # The engine's clock skips past the priority; nothing waits for an hour.
                passed = self.seconds + 1 if i == len(questions) - 1 else 0.0
                asks += [Ask(next(others), 1, passed=0.0 if j else passed) for j in range(count)]
            asks.append(Ask(system + question, 1, retention=retention))
        return Load(asks, 1, settings={})

    def visited(self, run: Run, flood: float) -> list[Trace]:
        return list(run.traces[:: self.prompts(flood) + 1])[1:]


class Hits(msgspec.Struct, frozen=True):
    before: float
    """While the priority held."""
    after: float
    """When it had expired."""
    first_token_before: float
    first_token_after: float


class RetentionPoint(msgspec.Struct, frozen=True):
    flood: float
    plain: Hits
    kept: Hits


class RetentionResult(RetentionPlan, frozen=True, kw_only=True):
    points: list[RetentionPoint]


def measure(plan: RetentionPlan, logs: Path, step: Step) -> RetentionResult:
    settings = {"max_tokens_per_step": PROMPT_TOKENS, "kv_cache_tokens": plan.pool_tokens}
    with engine_alone(TINY, engine_settings(plan.threads, **settings), logs) as engine:
        points = [_point(engine, plan, flood, step) for flood in plan.floods]
    return RetentionResult(**asdict(plan), points=points)


def _point(engine: System, plan: RetentionPlan, flood: float, step: Step) -> RetentionPoint:
    kept = RetentionParams((RangeRetention(0, plan.system_tokens, PRIORITY, plan.seconds),))
    sides = {
        f"flood of {flood:g} pools, {name}": (engine, plan.load(flood, retention))
        for name, retention in (("plain", RetentionParams()), ("kept", kept))
    }
    return RetentionPoint(flood, *(_hits(runs, plan, flood) for runs in interleave(sides, plan.repeats, step)))


def _hits(runs: Sequence[Run], plan: RetentionPlan, flood: float) -> Hits:
    visits = [plan.visited(run, flood) for run in runs]
    both = [trace for of_run in visits for trace in of_run[:-1]], [of_run[-1] for of_run in visits]
    before, after = (statistics.mean(trace.cached_tokens / plan.system_tokens for trace in traces) for traces in both)
    return Hits(before, after, *(statistics.median(trace.first_token_ms for trace in traces) for traces in both))


def section(result: RetentionResult) -> Section:
    worst = result.points[-1]
    rows = (
        f"{p.flood:g} | {p.plain.before:.0%} | **{p.kept.before:.0%}** | {p.kept.after:.0%} | "
        f"{number(p.plain.first_token_before)} | {number(p.kept.first_token_before)} | "
        f"{number(p.kept.first_token_after)}"
        for p in result.points
    )
    shares = "plain: found | kept: found | kept: found after its time"
    times = "plain: first token, ms | kept: first token, ms | after its time, ms"
    return Section(
        "A system prompt kept by priority",
        f"A pool of {result.pool_tokens:,} tokens. A system prompt of {result.system_tokens} tokens comes with a new "
        f"question each time, and other prompts flood the pool between two visits; *kept* gives it priority {PRIORITY} "
        f"for {result.seconds / 3600:g} h. {plural(result.visits, 'visit')} within that time, and one after it.",
        [
            f"Floods of {worst.flood:g} pools leave **{worst.plain.before:.0%}** of a plain system prompt and "
            f"**{worst.kept.before:.0%}** of a kept one, **{worst.kept.after:.0%}** once the priority has expired.",
        ],
        [table(f"flood, in pools | {shares} | {times}", rows)],
    )


def draw(result: RetentionResult) -> Figure:
    title = "A kept system prompt survives the flood until its time is over"
    kept = f"{result.system_tokens} tokens in a pool of {result.pool_tokens:,}, priority {PRIORITY}"
    about = f"{kept} for {result.seconds / 3600:g} h; other prompts come between two visits."
    figure, ((found, first),) = canvas((1, 2), (12, 4.6), title, about)
    shares = [(100 * p.plain.before, 100 * p.kept.before, 100 * p.kept.after) for p in result.points]
    times = [(p.plain.first_token_before, p.kept.first_token_before, p.kept.first_token_after) for p in result.points]
    names = (("plain", GREY), ("kept", BLUE), ("kept, after its time", ORANGE))
    for axes, rows, heading, unit in (
        (found, shares, "Found in the cache", "% of the system prompt"),
        (first, times, "First token of a visit", "ms"),
    ):
        columns = zip(*rows, strict=True)
        series = [Series(*name, values) for name, values in zip(names, columns, strict=True)]
        bars(axes, [f"{point.flood:g}" for point in result.points], series)
        frame(axes, heading, unit, x="flood between two visits, in pools")
    return figure


QUICK = RetentionPlan(1024, 128, floods=(2.0,), visits=1)
TOPIC = Topic(RetentionPlan(), QUICK, measure, RetentionResult, section, draw)

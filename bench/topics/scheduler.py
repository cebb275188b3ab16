"""What a step costs the engine besides the model: scheduling, and the whole loop, by the number of sequences."""

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.style import Series, canvas, dashed, frame, lines
from bench.harness.tables import Section, Table, number, numbers, short, table
from bench.harness.topic import Plan, Step, Topic
from bench.systems.scripted_engine import ScriptedEngine
from bench.topics.policies import COLOURS, POLICIES

LIMIT = 1000.0
"""Microseconds that a step of 256 sequences may take."""
LIMIT_AT = 256


class SchedulerPlan(Plan, frozen=True):
    running: tuple[int, ...] = (1, 64, 256, 1024)
    waiting: tuple[int, ...] = (0, 1000)
    samples: int = 200
    repeats: int = 3

    @property
    def steps(self) -> int:
        return len(POLICIES) * len(self.running) * len(self.waiting) * self.repeats


class StepCosts(msgspec.Struct, frozen=True):
    """Microseconds of a step: p50 and p99 of a round's steps, medians of the rounds."""

    schedule: float
    """From taking requests in to the call of the runner: expiry, schedule, planning."""
    schedule_p99: float
    whole: float
    """The step without the runner."""
    whole_p99: float


class SchedulerPoint(msgspec.Struct, frozen=True):
    policy: str
    running: int
    waiting: int
    costs: StepCosts


class SchedulerResult(SchedulerPlan, frozen=True, kw_only=True):
    points: list[SchedulerPoint]

    @property
    def sizes(self) -> list[int]:
        return sorted({point.running for point in self.points})

    @property
    def queues(self) -> list[int]:
        return sorted({point.waiting for point in self.points})

    def of(self, policy: str, waiting: int) -> list[SchedulerPoint]:
        """By the number of running sequences."""
        return [point for point in self.points if (point.policy, point.waiting) == (policy, waiting)]


def measure(plan: SchedulerPlan, _: Path, step: Step) -> SchedulerResult:
    found: dict[tuple[str, int, int], list[StepCosts]] = {}
    for round_ in range(plan.repeats):
        for running, waiting, policy in product(plan.running, plan.waiting, POLICIES):
            costs = _round(ScriptedEngine(policy, running, waiting, plan.samples))
            found.setdefault((policy, running, waiting), []).append(costs)
            step(f"{running:,} run, {waiting:,} wait, round {round_ + 1} of {plan.repeats}")
    points = [SchedulerPoint(*key, _medians(rounds)) for key, rounds in found.items()]
    return SchedulerResult(**asdict(plan), points=points)


def _round(engine: ScriptedEngine) -> StepCosts:
    with _frozen_heap():
        times = engine.timed_steps()
    schedule, whole = (1e6 * np.array(column) for column in zip(*times, strict=True))
    return StepCosts(*(float(np.percentile(each, percent)) for each in (schedule, whole) for percent in (50, 99)))


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """The garbage collector ignores existing objects, as in the engine's own process."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _medians(rounds: list[StepCosts]) -> StepCosts:
    return StepCosts(*(statistics.median(column) for column in zip(*map(msgspec.structs.astuple, rounds), strict=True)))


def section(result: SchedulerResult) -> Section:
    return Section(
        "What a step costs besides the model",
        "The engine's core around a runner that computes nothing, every sequence generating. *Scheduling*: expiry, "
        "schedule, planning. The *whole* step adds committing tokens, rows and statistics. "
        f"{result.samples} steps a round.",
        [_answer(result, queue) for queue in result.queues],
        [_table(result, queue) for queue in result.queues],
    )


def _answer(result: SchedulerResult, waiting: int) -> str:
    most = result.sizes[-1]
    at = LIMIT_AT if LIMIT_AT in result.sizes else most
    points = [point for point in result.points if point.waiting == waiting]
    slowest = max(point.costs.schedule for point in points if point.running == at)
    whole = max(point.costs.whole for point in points if point.running == most)
    return (
        f"{_queue(waiting)}: scheduling {at:,} sequences takes **{number(slowest)} µs** at most (limit: "
        f"{number(LIMIT)}), and at {most:,} the whole step **{number(whole / most)} µs** for each of them."
    )


def _table(result: SchedulerResult, waiting: int) -> Table:
    rows = []
    for policy, name in POLICIES.items():
        costs = [point.costs for point in result.of(policy, waiting)]
        for what, pairs in (
            ("scheduling", [(cost.schedule, cost.schedule_p99) for cost in costs]),
            ("whole", [(cost.whole, cost.whole_p99) for cost in costs]),
        ):
            rows.append(f"{name}: {what} | {' | '.join(numbers(*pair) for pair in pairs)}")
    running = " | ".join(f"{size:,} running" for size in result.sizes)
    return table(f"µs of a step, p50 · p99, {_queue(waiting)} | {running}", rows)


def _queue(waiting: int) -> str:
    return f"{waiting:,} requests wait" if waiting else "empty queue"


def draw(result: SchedulerResult) -> Figure:
    figure, ((schedule, whole),) = canvas(
        (1, 2),
        (12, 5.2),
        "What a step costs besides the model",
        "Median µs of a step by the number of generating sequences. Solid: empty queue; dashed: "
        f"{result.queues[-1]:,} requests wait as well.",
    )
    for axes, name, what in ((schedule, "Scheduling", "schedule"), (whole, "The whole step", "whole")):
        shown = [
            Series(
                f"{policy}, {_queue(waiting)}",
                COLOURS[policy],
                [getattr(point.costs, what) for point in result.of(policy, waiting)],
                "o--" if waiting else "o-",
            )
            for policy, waiting in product(POLICIES, result.queues)
        ]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lines(axes, result.sizes, shown)
        frame(axes, name, "µs of a step", x="generating sequences", grid="y")
    dashed(schedule, LIMIT_AT, f"limit: {short(LIMIT)} µs")
    return figure


QUICK = SchedulerPlan((1, 8), (0, 10), samples=5, repeats=1)
TOPIC = Topic(SchedulerPlan(), QUICK, measure, SchedulerResult, section, draw)

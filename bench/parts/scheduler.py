"""What a step costs the engine beside the model: scheduling, and the whole loop, by the number of sequences."""

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from bench.parts.policies import POLICIES
from bench.rounds import Step
from bench.systems.scripted_engine import Load, ScriptedEngine


class Plan(msgspec.Struct, frozen=True):
    """How many sequences run, and how many wait."""

    running: list[int]
    waiting: list[int]
    samples: int
    """Steps that are timed in a round."""
    repeats: int

    @property
    def steps(self) -> int:
        """Points times rounds."""
        return len(POLICIES) * len(self.running) * len(self.waiting) * self.repeats


class Costs(msgspec.Struct, frozen=True):
    """Microseconds of a step: p50 and p99 of a round's steps, medians of the rounds."""

    schedule: float
    """From taking requests in to the call of the runner: expiry, schedule, planning."""
    schedule_p99: float
    whole: float
    """The step but for the runner."""
    whole_p99: float


class Point(msgspec.Struct, frozen=True):
    """So many sequences under one policy."""

    policy: str
    running: int
    waiting: int
    costs: Costs


class Result(msgspec.Struct, frozen=True):
    """All points."""

    samples: int
    repeats: int
    points: list[Point]

    def of(self, policy: str, waiting: int) -> list[Point]:
        """Those of one policy and queue, by the number that run."""
        return [point for point in self.points if (point.policy, point.waiting) == (policy, waiting)]


def measure(plan: Plan, _: Path, step: Step) -> Result:
    """In this process; the policies take turns."""
    found: dict[tuple[str, int, int], list[Costs]] = {}
    for round_ in range(plan.repeats):
        for running, waiting, policy in product(plan.running, plan.waiting, POLICIES):
            costs = _round(Load(policy, running, waiting, plan.samples))
            found.setdefault((policy, running, waiting), []).append(costs)
            step(f"{running:,} run, {waiting:,} wait, round {round_ + 1} of {plan.repeats}")
    points = [Point(policy, running, waiting, _medians(rounds)) for (policy, running, waiting), rounds in found.items()]
    return Result(plan.samples, plan.repeats, points)


def _round(load: Load) -> Costs:
    engine = ScriptedEngine(load)
    with _as_in_a_process_of_its_own():
        times = engine.timed_steps()
    schedule, whole = (1e6 * np.array(column) for column in zip(*times, strict=True))
    return Costs(*(float(np.percentile(each, percent)) for each in (schedule, whole) for percent in (50, 99)))


@contextmanager
def _as_in_a_process_of_its_own() -> Iterator[None]:
    """What is there now is left alone by the garbage collector."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _medians(rounds: list[Costs]) -> Costs:
    return Costs(*(statistics.median(column) for column in zip(*map(msgspec.structs.astuple, rounds), strict=True)))

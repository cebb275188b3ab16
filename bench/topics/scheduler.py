"""The cost of a step without the model: scheduling, and the whole loop, by the number of sequences."""

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
import structlog
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.style import Series, canvas, dashed, frame, lines
from bench.harness.tables import Section, Table, number, numbers, short, table
from bench.harness.topic import Plan, Step, Topic
from bench.systems.direct import freeze_heap, submit
from bench.topics.policies import COLOURS, POLICIES
from engine_worker.core.engine import Engine
from engine_worker.core.refusals import EngineLimits
from engine_worker.hooks import Hooks
from engine_worker.step import Drawn, KeptRows, Slice
from engine_worker.step import Step as EngineStep
from sluice.settings.engine import Batching
from sluice.wire.calls import MethodCall
from sluice.wire.requests import Submit

TOKENS_PER_BLOCK = 16
PROMPT_TOKENS = 64
SETTLING_STEPS = 20
LIMIT_AT = 256
LIMIT = 1000.0  # Highest acceptable time to schedule a step of LIMIT_AT sequences, in microseconds.


class SchedulerPlan(Plan, frozen=True):
    running: tuple[int, ...] = (1, 64, 256, 1024)
    waiting: tuple[int, ...] = (0, 1000)
    samples: int = 200
    repeats: int = 3


class StepCosts(msgspec.Struct, frozen=True):
    """Microseconds of a step: p50 and p99 of the steps of a round, medians of the rounds."""

    schedule: float
    """From the intake of requests to the call of the runner: expiry, schedule, planning."""
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

    def of(self, policy: str, waiting: int) -> list[SchedulerPoint]:
        """The points by number of running sequences."""
        return [point for point in self.points if (point.policy, point.waiting) == (policy, waiting)]


class ScriptedRunner:
    """Samples the same token for every sequence, and records the times of its calls and returns."""

    tokens_per_block = TOKENS_PER_BLOCK
    num_host_blocks = 0
    adapters = None
    pool_file = None
    pool_folder = None
    window: int | None = None
    dtype = "none"
    exact = separates = False
    overlap = False
    draft_context: int | None = None
    called = returned = 0.0
    slices = 0
    tensors: Mapping[str, int] = {}
    hidden_size = 0
    image_rows = 0
    image_usage = None

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.choices = {"device": "none"}
        self._drawn = Drawn(1)

    def prepare(self, spec: Submit, *, running: bool = False) -> None:
        """No request needs a preparation."""

    def logit_rules(self, spec: Submit) -> list[None]:
        return [None] * spec.n

    def launch(self, step: EngineStep) -> "Done":
        self.called = time.thread_time()
        self.slices = len(step.slices)
        drawn = [self._drawn] * sum(len(part.draws) for part in step.slices)
        self.returned = time.thread_time()
        return Done(drawn)

    def draft(self, slices: Sequence[Slice]) -> NoReturn:
        raise NotImplementedError(f"the benchmark has no draft model for {len(slices)} slices")

    def call(self, call: MethodCall) -> NoReturn:
        raise NotImplementedError(f"the benchmark calls no methods, but {call.method}")

    def check(self) -> None:
        """There is no device."""


class Done(NamedTuple):
    drawn: list[Drawn]

    def collect(self) -> list[Drawn]:
        return self.drawn

    def missing_adapters(self) -> Mapping[int, str]:
        return {}

    def prompt_logprobs(self) -> list[bytes]:
        return []

    def kept_rows(self) -> list[list[KeptRows]]:
        return []


class ScriptedEngine:
    """The engine's core without a model: sequences that generate while others wait for a slot."""

    def __init__(self, policy: str, running: int, waiting: int, samples: int) -> None:
        self._running = running
        self._samples = samples
        self._taken = 0.0
        max_tokens = SETTLING_STEPS + samples + TOKENS_PER_BLOCK
        self._requests = [submit(number, _prompt(number), max_tokens) for number in range(running + waiting)]
        blocks = running * -(-(PROMPT_TOKENS + max_tokens) // TOKENS_PER_BLOCK)
        self._runner = ScriptedRunner(2 * blocks + TOKENS_PER_BLOCK)
        self._engine = Engine(
            self._runner,
            EngineLimits("", 1 << 20, PROMPT_TOKENS + max_tokens, len(self._requests)),
            Batching(running, running * PROMPT_TOKENS, capacity_scheduler_policy=policy),
            Hooks(self._get_requests, lambda _: None, lambda: (), lambda _: None),
            time.monotonic,
            structlog.get_logger(),
        )

    def timed_steps(self) -> list[tuple[float, float]]:
        """CPU seconds per step of scheduling, and of everything except the runner. Raises RuntimeError if a step does
        not run exactly the expected sequences."""
        for _ in range(SETTLING_STEPS):
            self._engine.step()
        return [self._timed_step() for _ in range(self._samples)]

    def _timed_step(self) -> tuple[float, float]:
        # CPU time of this thread excludes other processes on the machine.
        began = time.thread_time()
        self._engine.step()
        ended, runner = time.thread_time(), self._runner
        if runner.slices != self._running:
            raise RuntimeError(f"{runner.slices} sequences ran instead of {self._running}")
        return runner.called - self._taken, ended - began - (runner.returned - runner.called)

    def _get_requests(self, limit: int) -> list[Submit]:
        self._taken = time.thread_time()
        taken, self._requests = self._requests[:limit], self._requests[limit:]
        return taken


def _prompt(number: int) -> list[int]:
    return list(range(number * PROMPT_TOKENS, (number + 1) * PROMPT_TOKENS))


def measure(plan: SchedulerPlan, _: Path, step: Step) -> SchedulerResult:
    rounds: dict[tuple[str, int, int], list[list[float]]] = {}
    for round_ in range(plan.repeats):
        for running, waiting, policy in product(plan.running, plan.waiting, POLICIES):
            engine = ScriptedEngine(policy, running, waiting, plan.samples)
            freeze_heap()
            times = 1e6 * np.array(engine.timed_steps())
            # Rows are percentiles, columns scheduling and the whole step.
            costs = np.percentile(times, (50, 99), axis=0).T.ravel().tolist()
            rounds.setdefault((policy, running, waiting), []).append(costs)
            step(f"{running:,} run, {waiting:,} wait, round {round_ + 1} of {plan.repeats}")
    points = [SchedulerPoint(*key, StepCosts(*np.median(own, axis=0).tolist())) for key, own in rounds.items()]
    return SchedulerResult(**asdict(plan), points=points)


def section(result: SchedulerResult) -> Section:
    return Section(
        "Cost of a step without the model",
        "The engine's core with a runner that computes nothing, all sequences generating. *Scheduling*: expiry, "
        "schedule, planning. The *whole* step adds committing tokens, rows and statistics. "
        f"{result.samples} steps per round.",
        [_answer(result, queue) for queue in result.waiting],
        [_table(result, queue) for queue in result.waiting],
    )


def _answer(result: SchedulerResult, waiting: int) -> str:
    most = result.running[-1]
    at = LIMIT_AT if LIMIT_AT in result.running else most
    points = [point for point in result.points if point.waiting == waiting]
    slowest = max(point.costs.schedule for point in points if point.running == at)
    whole = max(point.costs.whole for point in points if point.running == most)
    return (
        f"{_queue(waiting).capitalize()}: scheduling {at:,} sequences takes at most **{number(slowest)} µs** (limit: "
        f"{number(LIMIT)}), and the whole step of {most:,} sequences **{number(whole / most)} µs** per sequence."
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
    running = " | ".join(f"{size:,} running" for size in result.running)
    return table(f"µs of a step, p50 · p99, {_queue(waiting)} | {running}", rows)


def _queue(waiting: int) -> str:
    return f"{waiting:,} requests wait" if waiting else "empty queue"


def draw(result: SchedulerResult) -> Figure:
    styles = f"Solid: empty queue; dashed: {result.waiting[-1]:,} requests wait as well."
    about = f"Median µs of a step by the number of generating sequences. {styles}"
    figure, ((schedule, whole),) = canvas((1, 2), (12, 5.2), "Cost of a step without the model", about)
    for axes, name, what in ((schedule, "Scheduling", "schedule"), (whole, "The whole step", "whole")):
        shown = [
            Series(
                f"{policy}, {_queue(waiting)}",
                COLOURS[policy],
                [getattr(point.costs, what) for point in result.of(policy, waiting)],
                "o--" if waiting else "o-",
            )
            for policy, waiting in product(POLICIES, result.waiting)
        ]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lines(axes, result.running, shown)
        frame(axes, name, "µs of a step", x="generating sequences", grid="y")
    dashed(schedule, LIMIT_AT, f"limit: {short(LIMIT)} µs")
    return figure


QUICK = SchedulerPlan((1, 8), (0, 10), samples=5, repeats=1)
TOPIC = Topic(SchedulerPlan(), QUICK, measure, SchedulerResult, section, draw)

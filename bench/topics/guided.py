"""The cost of guided decoding: a step of guided streams compared with plain streams, and the wait for a new guide."""

import json
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, GREY, Series, bars, canvas, frame
from bench.harness.tables import Section, number, plural, table
from bench.harness.topic import Plan, Step, Topic
from bench.peers.checkpoints import checkpoint
from engine_worker.backend import load_runner
from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import GuideModel
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.runner import ModelRunner
from engine_worker.sampling.logit_rules import LogitRules, build_logit_rules
from engine_worker.step import Draw, Slice
from engine_worker.step import Step as EngineStep
from sluice.checkpoint.folder import Checkpoint, open_checkpoint
from sluice.settings.engine import GuideLimits
from sluice.wire.params import Guide, GuideKind, SamplingParams

PLAIN = "no guide"
WIDE = {"type": "object", "properties": {f"field_{i}": {"type": "string", "maxLength": 40} for i in range(50)}}
LIST = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
GUIDES: Mapping[str, Guide] = {
    "JSON object": Guide(GuideKind.JSON_OBJECT),
    "list of objects": Guide(GuideKind.JSON_SCHEMA, json.dumps(LIST)),
    "schema of 50 fields": Guide(GuideKind.JSON_SCHEMA, json.dumps(WIDE)),
    "regex of free text": Guide(GuideKind.REGEX, r"(?s).*"),
}
LIMIT = 1.1
"""Highest acceptable ratio between the times of a step of 32 guided and 32 plain streams."""


class GuidedPlan(Plan, frozen=True):
    model: str = "25M"
    streams: tuple[int, ...] = (1, 32)
    prompt: int = 128
    steps: int = 60
    repeats: int = 5
    compiles: int = 5


class GuidedPoint(msgspec.Struct, frozen=True):
    guide: str
    streams: int
    threads: int
    milliseconds: float
    """Time of a step: median of the rounds' medians."""
    times_plain: float
    """Time divided by that of plain streams: median of the rounds' ratios."""


class Wait(msgspec.Struct, frozen=True):
    guide: str
    milliseconds: float
    """Time to prepare a new guide: median."""


class GuidedResult(GuidedPlan, frozen=True, kw_only=True):
    points: list[GuidedPoint]
    waits: list[Wait]

    def of(self, streams: int, threads: int) -> list[GuidedPoint]:
        return [point for point in self.points if (point.streams, point.threads) == (streams, threads)]

    @property
    def default_threads(self) -> int:
        return _thread_counts(self)[0]


class Streams:
    """Generating sequences with the same guide, or without a guide."""

    def __init__(self, runner: ModelRunner, guides: Guides, guide: Guide | None, count: int, plan: GuidedPlan) -> None:
        self._runner = runner
        self._guides = guides
        self._guide = guide
        self._sampling = SamplingParams(temperature=0.0)
        tokens = plan.prompt + plan.steps + 1
        size = -(-tokens // runner.tokens_per_block)
        self._tables = [list(range(i * size, (i + 1) * size)) for i in range(count)]
        self._prompts = python_prompts(TINY, count, plan.prompt)
        self._restart()

    def _restart(self) -> None:
        self._outputs: list[list[int]] = [[] for _ in self._prompts]
        self._rules = [self._new_rules() for _ in self._prompts]
        self._last = [prompt[-1] for prompt in self._prompts]
        self._at = [len(prompt) - 1 for prompt in self._prompts]

    def _new_rules(self) -> LogitRules | None:
        guided = [] if self._guide is None else self._guides.sequences(self._guide, (), 1)
        return build_logit_rules(self._sampling, (), guides=guided)[0]

    def timed_round(self, steps: int) -> float:
        """Median seconds of a step."""
        self._restart()
        for prompt, blocks in zip(self._prompts, self._tables, strict=True):
            self._runner.run(EngineStep((Slice(prompt[:-1], 0, blocks),)))
        # The first step creates the matchers.
        return median([self._step() for _ in range(steps + 1)][1:])

    def _step(self) -> float:
        slices = tuple(map(self._slice, range(len(self._prompts))))
        began = time.perf_counter()
        drawn = self._runner.run(EngineStep(slices))
        seconds = time.perf_counter() - began
        for i, result in enumerate(drawn):
            if result.fault is not None:
                raise RuntimeError(result.fault.message)
            self._at[i] += 1
            if result.complete:
                # The output is complete: start another one.
                self._outputs[i], self._rules[i] = [], self._new_rules()
            else:
                self._outputs[i].append(result.token)
                self._last[i] = result.token
        return seconds

    def _slice(self, i: int) -> Slice:
        draw = Draw(self._sampling, 0, len(self._outputs[i]), self._outputs[i], self._rules[i])
        return Slice([self._last[i]], self._at[i], self._tables[i], (draw,))


def _thread_counts(plan: GuidedPlan) -> list[int]:
    """The engine's default, which leaves one core free, and all cores."""
    return sorted({max(1, plan.threads - 1), plan.threads})


def measure(plan: GuidedPlan, _: Path, step: Step) -> GuidedResult:
    folder = open_checkpoint(str(checkpoint(plan.model)))
    with closing(Guides(GuideModel.of(folder), GuideLimits())) as guides:
        waits = _waits(guides, plan, step)
        points = [point for threads in _thread_counts(plan) for point in _points(folder, guides, plan, threads, step)]
    return GuidedResult(**asdict(plan), points=points, waits=waits)


def _points(folder: Checkpoint, guides: Guides, plan: GuidedPlan, threads: int, step: Step) -> list[GuidedPoint]:
    most, points = max(plan.streams), []
    config = RunnerConfig(
        device="cpu",
        dtype="float32",
        threads=threads,
        max_batch_size=most,
        max_tokens_per_step=max(512, most),
        kv_cache_tokens=most * (plan.prompt + plan.steps + 64),
    )
    extensions = Extensions(guides=guides)
    runner = load_runner(folder, config, lambda *_: None, lambda *_: None, lambda *_: None, extensions=extensions)
    for count in plan.streams:
        contenders = {name: Streams(runner, guides, guide, count, plan) for name, guide in _kinds().items()}
        rounds: dict[str, list[float]] = {name: [] for name in contenders}
        for number_of_round in range(plan.repeats):
            for name, streams in contenders.items():
                rounds[name].append(1e3 * streams.timed_round(plan.steps))
            step(f"{threads} threads, {count} streams, round {number_of_round + 1} of {plan.repeats}")
        for name, own in rounds.items():
            times = median(one / plain for one, plain in zip(own, rounds[PLAIN], strict=True))
            points.append(GuidedPoint(name, count, threads, median(own), times))
    runner.close()
    return points


def _kinds() -> dict[str, Guide | None]:
    return {PLAIN: None, **GUIDES}


def _waits(guides: Guides, plan: GuidedPlan, step: Step) -> list[Wait]:
    found: dict[str, list[float]] = {name: [] for name in GUIDES}
    _wait(guides, Guide(GuideKind.CHOICE, '["the first one starts the processes"]'))
    for number_of_round in range(plan.compiles):
        for name, guide in GUIDES.items():
            # Make the guide new: another title in the schema, or one more alternative in the expression.
            found[name].append(1e3 * _wait(guides, _another(guide, number_of_round)))
        step(f"new guides, round {number_of_round + 1} of {plan.compiles}")
    for guide in GUIDES.values():
        _wait(guides, guide)
    return [Wait(name, median(times)) for name, times in found.items()]


def _another(guide: Guide, i: int) -> Guide:
    if guide.kind is GuideKind.REGEX:
        return Guide(guide.kind, f"{guide.text}|{i}")
    schema = json.loads(guide.text or '{"type": "object"}')
    return Guide(GuideKind.JSON_SCHEMA, json.dumps({**schema, "title": str(i)}))


def _wait(guides: Guides, guide: Guide) -> float:
    began = time.perf_counter()
    preparation = guides.prepare(guide)
    while preparation is not None and not preparation.poll():
        time.sleep(0.0005)
    return time.perf_counter() - began


def section(result: GuidedResult) -> Section:
    most, default, columns = result.streams[-1], result.default_threads, _columns(result)
    slowest = max(result.waits, key=lambda wait: wait.milliseconds)
    return Section(
        "Cost of guided decoding",
        f"The engine's runner in process, {result.model} Qwen3 shape, greedy. The guide worker computes masks during "
        "the forward pass: on the core that the engine leaves free by default, or competing with its threads if these "
        "use all cores.",
        [
            f"A step of {most} guided streams takes at most **{_most_times(result, default)} ×** the time of a step of "
            f"plain streams (limit: {number(LIMIT)}), and {_most_times(result, result.threads)} × if the engine uses "
            f"all cores; a new guide is ready within {number(slowest.milliseconds)} ms."
        ],
        [
            table(
                "a step, ms (ratio to plain streams) | "
                + " | ".join(f"{plural(count, 'stream')}, {plural(threads, 'thread')}" for threads, count in columns),
                [f"{name} | " + " | ".join(_cell(result, name, *column) for column in columns) for name in _kinds()],
            ),
            table(
                "a new guide | ms until it is ready",
                [f"{wait.guide} | {number(wait.milliseconds)}" for wait in result.waits],
            ),
        ],
    )


def _columns(result: GuidedResult) -> list[tuple[int, int]]:
    return [(threads, count) for threads in _thread_counts(result) for count in result.streams]


def _most_times(result: GuidedResult, threads: int) -> str:
    points = result.of(result.streams[-1], threads)
    return number(max(point.times_plain for point in points if point.guide != PLAIN))


def _cell(result: GuidedResult, name: str, threads: int, streams: int) -> str:
    (point,) = (point for point in result.of(streams, threads) if point.guide == name)
    return f"{number(point.milliseconds)} ({number(point.times_plain)})"


def draw(result: GuidedResult) -> Figure:
    figure, ((steps, waits),) = canvas(
        (1, 2),
        (12, 4.6),
        "Cost of guided decoding",
        "Steps of guided streams, and the wait for a new guide.",
    )
    most = result.streams[-1]
    shown = [
        Series(
            f"{most} streams, {plural(threads, 'thread')}",
            colour,
            [point.times_plain for point in result.of(most, threads)],
        )
        for threads, colour in zip(_thread_counts(result), (BLUE, GREY), strict=False)
    ]
    bars(steps, list(_kinds()), shown)
    frame(steps, "A step", "ratio to plain streams", grid="y")
    bars(waits, list(GUIDES), [Series("ms", BLUE, [wait.milliseconds for wait in result.waits])])
    frame(waits, "A new guide", "ms until it is ready", grid="y")
    return figure


QUICK = GuidedPlan("tiny", (1, 2), 16, steps=3, repeats=1, compiles=1)
TOPIC = Topic(GuidedPlan(), QUICK, measure, GuidedResult, section, draw)

"""The cost of LoRA adapters: several in one batch compared with none, and an engine with LoRA that no request uses
compared with an engine without."""

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.adapters import write_adapter
from bench.harness.load import Load, PlannedRequest
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import rate, ratio
from bench.harness.style import BLUE, GREY, ORANGE, Series, canvas, frame, lines
from bench.harness.tables import Section, number, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.peers.checkpoints import checkpoint
from bench.systems.engine_alone import engine_alone
from sluice.wire.adapters import Adapter

COLOURS = (BLUE, ORANGE)
GOAL = 0.85
GOAL_COUNT = 4
"""Number of adapters in a batch for which the goal applies."""


class LoraPlan(Plan, frozen=True):
    models: tuple[str, ...] = ("tiny", "25M")
    counts: tuple[int, ...] = (1, 4, 16)
    """Numbers of adapters in a batch."""
    rank: int = 8
    at_once: int = 16
    """Requests in flight."""
    requests: int = 32
    prompt: int = 64
    tokens: int = 96
    repeats: int = 3
    starts: int = 7
    """Starts of the engines with and without LoRA, whose difference is smaller than that between two processes."""


class LoraPoint(msgspec.Struct, frozen=True):
    model: str
    off: float
    """Tokens/s of an engine without LoRA, with torch: median of the rounds."""
    unused: float
    """Speed with LoRA that no request uses divided by `off`: median over the starts of the medians over the rounds."""
    speeds: tuple[float, ...]
    """Speed with `counts` adapters divided by that without adapters on the same engine."""
    openvino: float
    """Speed of an engine without LoRA with the default backend, divided by `off`."""


class LoraResult(LoraPlan, frozen=True, kw_only=True):
    points: list[LoraPoint]


class Settings(NamedTuple):
    """Settings of three engines."""

    default: dict[str, Any]
    off: dict[str, Any]
    """Without LoRA, with torch."""
    on: dict[str, Any]
    """With LoRA."""


def measure(plan: LoraPlan, logs: Path, step: Step) -> LoraResult:
    default = engine_settings(plan.threads)
    off = default | {"backend": "torch"}
    on = off | {"lora": True, "lora_folders": logs, "lora_device_cache_percent": 0.2}
    settings = Settings(default, off, on)
    return LoraResult(**asdict(plan), points=[_point(plan, name, settings, logs, step) for name in plan.models])


def _point(plan: LoraPlan, name: str, settings: Settings, logs: Path, step: Step) -> LoraPoint:
    model, plain = checkpoint(name), _load(plan, [])
    adapters = [write_adapter(logs / f"{name}-{i}", model, plan.rank, i) for i in range(max(plan.counts))]
    with ExitStack() as stack:
        default, off, on = (stack.enter_context(engine_alone(model, each, logs)) for each in settings)
        sides = {
            f"{name}, default": (default, plain),
            f"{name}, off": (off, plain),
            f"{name}, no adapter": (on, plain),
            **{f"{name}, {count} adapters": (on, _load(plan, adapters[:count])) for count in plan.counts},
        }
        by_default, without, unused, *others = interleave(sides, plan.repeats, step)
    return LoraPoint(
        name,
        statistics.median(map(rate, without)),
        _unused(plan, name, settings, logs, step),
        tuple(ratio(runs, unused) for runs in others),
        ratio(by_default, without),
    )


def _unused(plan: LoraPlan, name: str, settings: Settings, logs: Path, step: Step) -> float:
    ratios = []
    for start in range(1, plan.starts + 1):
        with ExitStack() as stack:
            off, on = (stack.enter_context(engine_alone(checkpoint(name), each, logs)) for each in settings[1:])
            load = _load(plan, [])
            sides = {f"{name}, start {start}, {each}": (engine, load) for each, engine in (("off", off), ("on", on))}
            without, unused = interleave(sides, plan.repeats, step)
        ratios.append(ratio(unused, without))
    return statistics.median(ratios)


def _load(plan: LoraPlan, adapters: list[Adapter]) -> Load:
    prompts = python_prompts(TINY, plan.requests, plan.prompt)
    requests = [
        PlannedRequest(prompt, plan.tokens, adapter=adapters[i % len(adapters)] if adapters else None)
        for i, prompt in enumerate(prompts)
    ]
    return Load(requests, plan.at_once, salt=f"{len(adapters)}")


def section(result: LoraResult) -> Section:
    index = result.counts.index(GOAL_COUNT) if GOAL_COUNT in result.counts else 0
    worst = min(result.points, key=lambda point: point.speeds[index])
    unused = min(result.points, key=lambda point: point.unused)
    counts = " | ".join(f"{count} adapters" for count in result.counts)
    return Section(
        "LoRA adapters",
        f"The engine in process, with torch: {result.at_once} requests at a time, {result.tokens} output tokens after "
        f"{result.prompt} prompt tokens; adapters of rank {result.rank} on all seven linear maps, in turns. Each "
        "request has one of the adapters.",
        [
            f"With {result.counts[index]} adapters in one batch the engine has at least **{worst.speeds[index]:.2f}×** "
            f"its speed without adapters ({worst.model}; goal: {GOAL}×).",
            f"An engine with LoRA that no request uses has at least **{unused.unused:.3f}×** the speed of an engine "
            f"without LoRA ({unused.model}; {result.starts} starts of both).",
        ],
        [
            table(
                f"speed / without adapters | LoRA unused / LoRA off | {counts}",
                [
                    f"{point.model} | {point.unused:.3f}× | " + " | ".join(f"{speed:.2f}×" for speed in point.speeds)
                    for point in result.points
                ],
            ),
            table(
                "LoRA off | tokens/s with torch | default backend / torch",
                [f"{point.model} | {number(point.off)} | {point.openvino:.2f}×" for point in result.points],
            ),
        ],
    )


def draw(result: LoraResult) -> Figure:
    about = f"Speed with adapters divided by that without, {result.at_once} requests at a time."
    figure, ((axes,),) = canvas((1, 1), (7, 4.6), "LoRA adapters", about)
    shown = [
        Series(point.model, colour, list(point.speeds)) for point, colour in zip(result.points, COLOURS, strict=False)
    ]
    lines(axes, result.counts, shown)
    frame(axes, f"Adapters of rank {result.rank} in one batch", "ratio of speeds", x="adapters", grid="y")
    axes.axhline(GOAL, color=GREY, linestyle=":", linewidth=1)
    return figure


QUICK = LoraPlan(("tiny",), (2,), at_once=2, requests=2, prompt=16, tokens=6, repeats=1, starts=1)
TOPIC = Topic(LoraPlan(), QUICK, measure, LoraResult, section, draw)

"""What the ring costs: the engine alone against the same engine behind router, detokenizers and gRPC."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from bench.harness.load import Ask, Load, Run, System
from bench.harness.models import TINY, python_prompts, write_qwen3_06b
from bench.harness.stats import Figures, figures, ratio
from bench.harness.style import BLUE, GREY, ORANGE, SOFT, TEAL, canvas, frame, note
from bench.harness.tables import Section, Table, plural, short, span, table
from bench.harness.topic import Step, Topic, engine_settings, interleave, latency_cells, rate_text
from bench.systems.engine_alone import engine_alone
from bench.systems.ring import through_ring

SERVICES = ("router", "detok")
PROCESSES = {"engine": (BLUE, "engine"), "router": (TEAL, "router"), "detok": (ORANGE, "detokenizers")} | {
    "client": (GREY, "client")
}
WIDTH = 0.36
"""Of a bar."""


class StreamShape(msgspec.Struct, frozen=True):
    """Streams that all begin at once."""

    streams: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{plural(self.streams, 'stream')}, {self.prompt_tokens} in, {self.output_tokens} out"


class ModelPlan(msgspec.Struct, frozen=True):
    title: str
    model: Path
    shapes: list[StreamShape]
    repeats: int
    engine: Mapping[str, Any]


class RingPlan(msgspec.Struct, frozen=True):
    models: list[ModelPlan]

    @property
    def steps(self) -> int:
        return sum(2 * len(model.shapes) * (1 + model.repeats) for model in self.models)


class RingPoint(msgspec.Struct, frozen=True):
    """Both systems under one shape."""

    shape: StreamShape
    alone: Figures
    ring: Figures
    ratio: float
    """Tokens per second through the ring by those of the engine alone: median of the rounds' ratios."""


class RingModel(msgspec.Struct, frozen=True):
    title: str
    points: list[RingPoint]


class RingResult(msgspec.Struct, frozen=True):
    models: list[RingModel]


def plan(quick: bool, threads: int, folder: Path) -> RingPlan:
    """The tiny model, and unless quick a large one whose steps take some tenths of a second."""
    shapes = [(1, 16, 8), (4, 16, 8)] if quick else [(1, 64, 256), (16, 64, 128), (64, 64, 128)]
    engine = engine_settings(threads)
    tiny = ModelPlan("tiny model (5M parameters)", TINY, _shapes(shapes), 1 if quick else 5, engine)
    if quick:
        return RingPlan([tiny])
    large = ModelPlan(
        "Qwen3-0.6B shape, random weights",
        write_qwen3_06b(folder / "qwen3-0.6b-shape"),
        _shapes([(1, 8, 12), (16, 8, 10), (64, 4, 6)]),
        3,
        engine | {"weights": "random", "kv_cache_tokens": 4096},
    )
    return RingPlan([tiny, large])


def _shapes(sizes: Sequence[tuple[int, int, int]]) -> list[StreamShape]:
    return [StreamShape(*size) for size in sizes]


def measure(plan: RingPlan, logs: Path, step: Step) -> RingResult:
    return RingResult([_measure_model(model, logs, step) for model in plan.models])


def _measure_model(plan: ModelPlan, logs: Path, step: Step) -> RingModel:
    """Both systems stay up and take turns."""
    with engine_alone(plan.model, plan.engine, logs) as alone, through_ring(plan.model, plan.engine, logs) as ring:
        points = []
        for shape in plan.shapes:
            prompts = python_prompts(plan.model, shape.streams, shape.prompt_tokens)
            load = Load([Ask(prompt, shape.output_tokens) for prompt in prompts], width=shape.streams)
            systems: list[System[Run]] = [alone, ring]
            of_alone, of_ring = interleave([(system, load) for system in systems], plan.repeats, step)
            points.append(RingPoint(shape, figures(of_alone), figures(of_ring), ratio(of_ring, of_alone)))
    return RingModel(plan.title, points)


def section(result: RingResult) -> Section:
    return Section(
        "Engine alone and through the ring",
        "The same engine with the same settings: driven in process, and behind router, two detokenizers and a gRPC "
        "client process. All streams begin at once; a stream's *inter-token* time is that between two deltas.",
        [_share(model) for model in result.models],
        [each for model in result.models for each in (_speeds(model), _costs(model))],
    )


def _share(model: RingModel) -> str:
    ratios = [point.ratio for point in model.points]
    shares = [_ring_share(point.ring) for point in model.points]
    clients = [point.ring.cpu_per_token["client"] for point in model.points]
    return (
        f"**{model.title}**: through the ring {span(ratios, '.0%')} of the engine's own tokens/s. The ring (router "
        f"and detokenizers) takes {span(shares, '.1%')} of the servers' CPU time; the load generator on the same "
        f"cores costs another {span(clients, '.0f')} µs per token."
    )


def _ring_share(figures: Figures) -> float:
    own = sum(figures.cpu_per_token[service] for service in SERVICES)
    return own / (own + figures.cpu_per_token["engine"])


def _speeds(model: RingModel) -> Table:
    rows = []
    for point in model.points:
        rows.append(f"{point.shape} | engine alone | {rate_text(point.alone)} | | {latency_cells(point.alone)}")
        speed = f"{rate_text(point.ring)} | **{point.ratio:.2f}**"
        rows.append(f"| through the ring | {speed} | {latency_cells(point.ring)}")
    columns = "tokens/s (range) | ring / alone | first token p50 · p99, ms | inter-token p50 · p99, ms"
    return table(f"{model.title} | | {columns}", rows)


def _costs(model: RingModel) -> Table:
    rows = []
    for point in model.points:
        used = point.ring.cpu_per_token
        cells = [point.alone.cpu_per_token["engine"], *(used[name] for name in ("engine", *SERVICES, "client"))]
        costs = " | ".join(f"{cell:.0f}" for cell in cells)
        rows.append(f"{point.shape} | {costs} | {point.ring.tokens_per_delta:.2f}")
    columns = "engine alone | engine in the ring | router | detokenizers | client | tokens per delta"
    return table(f"CPU µs per token | {columns}", rows)


def draw(result: RingResult) -> Figure:
    """A row per model: throughput, both latencies, CPU time by process."""
    figure, grid = canvas(
        (len(result.models), 4),
        (14, 0.8 + 3.2 * len(result.models)),
        "What the ring costs",
        "Grey: the engine driven in process. Blue: the same engine behind router, detokenizers and gRPC.",
    )
    for axes, model in zip(grid, result.models, strict=True):
        points = model.points
        _draw_rates(axes[0], model)
        _draw_latency(axes[1], points, "First token", lambda f: (f.first_token_p50, f.first_token_p99))
        _draw_latency(axes[2], points, "Between two deltas", lambda f: (f.inter_token_p50, f.inter_token_p99))
        _draw_cpu(axes[3], points)
        for each in axes:
            each.set_xticks(range(len(points)), [plural(point.shape.streams, "stream") for point in points])
    return figure


def _draw_rates(axes: Axes, model: RingModel) -> None:
    for i, point in enumerate(model.points):
        for shift, found, colour in ((-WIDTH / 2, point.alone, GREY), (WIDTH / 2, point.ring, BLUE)):
            rate = found.tokens_per_second
            axes.bar(i + shift, rate, WIDTH * 0.94, color=colour)
            note(axes, short(rate), (i + shift, rate), (0, 2))
        note(axes, f"{point.ratio:.0%}", (i, 0), (0, -28), xycoords=("data", "axes fraction"), size=10, weight="bold")
    axes.set_xlabel("of the engine alone", labelpad=21, color=SOFT)
    axes.set_yticks([])
    axes.margins(y=0.12)
    frame(axes, model.title, "output tokens per second")


def _draw_latency(
    axes: Axes, points: Sequence[RingPoint], heading: str, times: Callable[[Figures], tuple[float | None, float | None]]
) -> None:
    for i, point in enumerate(points):
        for side, found, colour in ((-1, point.alone, GREY), (1, point.ring, BLUE)):
            at = i + 0.12 * side
            middle, high = times(found)
            if middle is None or high is None:
                continue
            axes.plot([at, at], [middle, high], color=colour, linewidth=2, alpha=0.55)
            axes.plot(at, middle, "o", color=colour, markersize=7)
            axes.plot(at, high, "_", color=colour, markersize=8, markeredgewidth=2)
            note(axes, short(middle), (at, middle), (side * 7, 0), ha="right" if side < 0 else "left", va="center")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.margins(y=0.12)
    frame(axes, heading, "ms; ● p50, ─ p99", grid="y")


def _draw_cpu(axes: Axes, points: Sequence[RingPoint]) -> None:
    for i, point in enumerate(points):
        used = point.ring.cpu_per_token
        total, at = sum(used.values()), 0.0
        for process, (colour, name) in PROCESSES.items():
            share = used[process] / total
            axes.bar(i, share, 0.62, at, color=colour, label=name if i == 0 else None)
            if share > 0.06:
                note(axes, short(used[process]), (i, at + share / 2), (0, 0), va="center", color="white")
            at += share
        note(axes, short(total), (i, 1), (0, 3))
    axes.set_yticks([])
    axes.set_ylim(0, 1.08)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False, reverse=True)
    frame(axes, "CPU time through the ring", "µs per token, by process")


TOPIC = Topic(plan, measure, RingResult, section, draw)

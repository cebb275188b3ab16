"""The cost of the ring: the engine alone compared with the same engine behind router, detokenizers and gRPC."""

from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from bench.harness.load import Load, PlannedRequest, System
from bench.harness.models import TINY, python_prompts, write_qwen3_06b
from bench.harness.stats import Figures, figures, ratio
from bench.harness.style import BLUE, GREY, ORANGE, TEAL, Series, bars, canvas, frame
from bench.harness.tables import Section, Table, plural, short, span, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave, speed_cells
from bench.systems.engine_alone import engine_alone
from bench.systems.ring import through_ring

SERVICES = ("router", "detok")
SIDES = {"alone": GREY, "ring": BLUE}
PROCESSES = {"engine": BLUE, "router": TEAL, "detok": ORANGE, "client": GREY}


class StreamShape(msgspec.Struct, frozen=True):
    streams: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{plural(self.streams, 'stream')}, {self.prompt_tokens} in, {self.output_tokens} out"


class ModelPlan(msgspec.Struct, frozen=True):
    title: str
    shapes: list[StreamShape]
    random_weights: bool = False
    """Random weights in the shape of Qwen3-0.6B, instead of the tiny model."""


class RingPlan(Plan, frozen=True):
    models: list[ModelPlan]
    repeats: int


class RingPoint(msgspec.Struct, frozen=True):
    shape: StreamShape
    alone: Figures
    ring: Figures
    ratio: float
    """Tokens per second through the ring divided by those of the engine alone: median of the rounds' ratios."""


class RingModel(msgspec.Struct, frozen=True):
    title: str
    points: list[RingPoint]


class RingResult(msgspec.Struct, frozen=True):
    models: list[RingModel]


def measure(plan: RingPlan, logs: Path, step: Step) -> RingResult:
    return RingResult([_measure_model(model, plan, logs, step) for model in plan.models])


def _measure_model(model: ModelPlan, plan: RingPlan, logs: Path, step: Step) -> RingModel:
    folder, engine = TINY, engine_settings(plan.threads)
    if model.random_weights:
        folder = write_qwen3_06b(logs / "qwen3-0.6b-shape")
        engine = engine_settings(plan.threads, weights="random", kv_cache_tokens=4096)
    with engine_alone(folder, engine, logs) as alone, through_ring(folder, engine, logs) as ring:
        points = []
        for shape in model.shapes:
            prompts = python_prompts(folder, shape.streams, shape.prompt_tokens)
            load = Load([PlannedRequest(prompt, shape.output_tokens) for prompt in prompts], width=shape.streams)
            sides: dict[str, tuple[System, Load]] = {"alone": (alone, load), "ring": (ring, load)}
            of_alone, of_ring = interleave(sides, plan.repeats, step)
            points.append(RingPoint(shape, figures(of_alone), figures(of_ring), ratio(of_ring, of_alone)))
    return RingModel(model.title, points)


def section(result: RingResult) -> Section:
    return Section(
        "Engine alone and through the ring",
        "The same engine in process, and behind router, two detokenizers and a gRPC client. All streams start "
        "together; *inter-token* is the time between two deltas.",
        [_share(model) for model in result.models],
        [each for model in result.models for each in (_speeds(model), _costs(model))],
    )


def _share(model: RingModel) -> str:
    ratios = [point.ratio for point in model.points]
    shares = [_ring_share(point.ring) for point in model.points]
    clients = [point.ring.cpu_per_token["client"] for point in model.points]
    return (
        f"**{model.title}**: the ring reaches {span(ratios, '.0%')} of the tokens/s of the engine alone. The ring "
        f"(router and detokenizers) takes {span(shares, '.1%')} of the servers' CPU time; the load generator on the "
        f"same cores takes another {span(clients, '.0f')} µs per token."
    )


def _ring_share(figures: Figures) -> float:
    own = sum(figures.cpu_per_token[service] for service in SERVICES)
    return own / (own + figures.cpu_per_token["engine"])


def _speeds(model: RingModel) -> Table:
    rows = []
    for point in model.points:
        rows.append(f"{point.shape} | engine alone | {speed_cells(point.alone, '')}")
        rows.append(f"| through the ring | {speed_cells(point.ring, f'**{point.ratio:.2f}**')}")
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
    about = "Grey: the engine in process. Blue: the same engine behind router, detokenizers and gRPC."
    rows = len(result.models)
    figure, grid = canvas((rows, 4), (18, 0.8 + 3.4 * rows), "Cost of the ring", about)
    for (rates, first, inter, cpu), model in zip(grid, result.models, strict=True):
        streams = [plural(point.shape.streams, "stream") for point in model.points]
        sides = [(name, colour, [getattr(p, name) for p in model.points]) for name, colour in SIDES.items()]
        shown = [Series(name, colour, [found.tokens_per_second for found in own]) for name, colour, own in sides]
        bars(rates, [f"{name}\n{p.ratio:.0%}" for name, p in zip(streams, model.points, strict=True)], shown)
        frame(rates, model.title, "output tokens per second; %: of the engine alone")
        latencies = ((first, "First token", "first_token"), (inter, "Between two deltas", "inter_token"))
        for axes, heading, what in latencies:
            shown = [
                Series(f"{name} p{p}", (colour, p / 100), [getattr(found, f"{what}_p{p}") or 0.0 for found in own])
                for name, colour, own in sides
                for p in (50, 99)
            ]
            bars(axes, streams, shown)
            axes.set_yscale("log")
            axes.margins(y=0.25)
            frame(axes, heading, "ms, logarithmic")
        used = [point.ring.cpu_per_token for point in model.points]
        totals = [sum(each.values()) for each in used]
        shown = [
            Series(name, colour, [100 * each[name] / total for each, total in zip(used, totals, strict=True)])
            for name, colour in PROCESSES.items()
        ]
        names = [f"{name}\n{short(total)} µs" for name, total in zip(streams, totals, strict=True)]
        bars(cpu, names, shown, stacked=True)
        frame(cpu, "CPU time through the ring", "% by process; below: per token")
    return figure


TINY_TITLE = "tiny model (5M parameters)"
TINY_PLAN = ModelPlan(TINY_TITLE, [StreamShape(1, 64, 256), StreamShape(16, 64, 128), StreamShape(64, 64, 128)])
LARGE_SHAPES = [StreamShape(1, 8, 12), StreamShape(16, 8, 10), StreamShape(64, 4, 6)]
LARGE_PLAN = ModelPlan("Qwen3-0.6B shape, random weights", LARGE_SHAPES, random_weights=True)
QUICK = RingPlan([ModelPlan(TINY_TITLE, [StreamShape(1, 16, 8), StreamShape(4, 16, 8)])], 1)
TOPIC = Topic(RingPlan([TINY_PLAN, LARGE_PLAN], 3), QUICK, measure, RingResult, section, draw)

"""The cost of log-probabilities of a prompt, compared with the same prompt without them."""

import json
import statistics
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict, replace

from bench.harness.load import Load, PlannedRequest
from bench.harness.models import QWEN3_25M, TINY, python_prompts, write_shape
from bench.harness.stats import ratio
from bench.harness.style import BLUE, GREY, ORANGE, Series, bars, canvas, frame
from bench.harness.tables import Section, number, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.systems.engine_alone import engine_alone

LIMIT = 1.3
"""Highest acceptable ratio to a prompt without log-probabilities, for a model whose head is small."""
TOPS = (0, 20)
BACKENDS = ("torch", "openvino")


class PromptLogprobsPlan(Plan, frozen=True):
    prompt: int = 1024
    requests: int = 4
    """One after the other."""
    large: bool = True
    """Also a model with a large vocabulary."""
    repeats: int = 5


class PromptLogprobsPoint(msgspec.Struct, frozen=True):
    model: str
    backend: str
    head: float
    """Multiplications of the head divided by those of all other matrices."""
    plain: float
    """Milliseconds of a prompt without log-probabilities."""
    cost: list[float]
    """Time divided by that of a prompt without log-probabilities, for each of TOPS."""


class PromptLogprobsResult(PromptLogprobsPlan, frozen=True, kw_only=True):
    points: list[PromptLogprobsPoint]


def measure(plan: PromptLogprobsPlan, logs: Path, step: Step) -> PromptLogprobsResult:
    models = {"tiny": TINY}
    if plan.large:
        models["25M"] = write_shape(logs / "25m", QWEN3_25M)
    points = []
    for name, folder in models.items():
        for backend in BACKENDS:
            random = {} if folder == TINY else {"weights": "random"}
            settings = engine_settings(plan.threads, backend=backend, **random)
            with engine_alone(folder, settings, logs) as engine:
                requests = [PlannedRequest(prompt, 1) for prompt in python_prompts(TINY, plan.requests, plan.prompt)]
                sides = {
                    f"{name}, {backend}, {'plain' if top is None else f'{top} alternatives'}": (
                        engine,
                        Load([replace(request, prompt_logprobs=top) for request in requests], 1),
                    )
                    for top in (None, *TOPS)
                }
                plain, *scored = interleave(sides, plan.repeats, step)
            first = statistics.median(trace.first_token_ms for run in plain for trace in run.traces)
            costs = [1 / ratio(runs, plain) for runs in scored]
            points.append(PromptLogprobsPoint(name, backend, _head(folder), first, costs))
    return PromptLogprobsResult(**asdict(plan), points=points)


def _head(folder: Path) -> float:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * size * heads * config["head_dim"] + 3 * size * config["intermediate_size"]
    found: float = size * config["vocab_size"] / (layer * config["num_hidden_layers"])
    return found


def section(result: PromptLogprobsResult) -> Section:
    head = " | ".join(f"{top} alternatives" for top in TOPS)
    rows = [
        f"{point.model}, {point.backend} | {number(point.plain)} | {1 + point.head:.2f}× | "
        + " | ".join(f"{cost:.2f}×" for cost in point.cost)
        for point in result.points
    ]
    small = min(result.points, key=lambda point: point.head)
    tiny = [cost for point in result.points if point.model == small.model for cost in point.cost]
    return Section(
        "Log-probabilities of the prompt",
        f"Prompts of {result.prompt:,} tokens, one at a time, with the engine in process and nothing cached. The head "
        "computes logits for every position; *with the head* is the ratio to be expected from the number of its "
        "multiplications.",
        [
            f"The {small.model} model: **{min(tiny):.2f} to {max(tiny):.2f}×** the time of a prompt without "
            f"log-probabilities (goal: {LIMIT}×; expected from the head's multiplications: {1 + small.head:.2f}×).",
            *_by_the_head(result, small),
        ],
        [table(f"model | ms without log-probabilities | with the head | {head}", rows)],
    )


def _by_the_head(result: PromptLogprobsResult, small: PromptLogprobsPoint) -> list[str]:
    """The answer for models with a large head."""
    large = [point for point in result.points if point.model != small.model]
    if not large:
        return []
    costs = [cost / (1 + point.head) for point in large for cost in point.cost]
    return [
        f"The {large[0].model} model: {min(costs):.2f} to {max(costs):.2f}× the time that is expected from the head's "
        "multiplications."
    ]


def draw(result: PromptLogprobsResult) -> Figure:
    about = f"Time of a prompt of {result.prompt:,} tokens, divided by that without log-probabilities."
    figure, ((axes,),) = canvas((1, 1), (8, 4.8), "Log-probabilities of the prompt", about)
    names = [f"{point.model}, {point.backend}" for point in result.points]
    series = [Series("expected from the head", GREY, [1 + point.head for point in result.points])]
    series += [
        Series(f"{top} alternatives", colour, [point.cost[i] for point in result.points])
        for i, (top, colour) in enumerate(zip(TOPS, (BLUE, ORANGE), strict=True))
    ]
    bars(axes, names, series)
    frame(axes, below="ratio to a prompt without", grid="y")
    return figure


QUICK = PromptLogprobsPlan(prompt=64, requests=2, large=False, repeats=1)
TOPIC = Topic(PromptLogprobsPlan(), QUICK, measure, PromptLogprobsResult, section, draw)

"""The cost of beam search: a width of w compared with n = w sampled sequences of the same requests."""

import statistics
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.load import Load, PlannedRequest
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import rate, ratio
from bench.harness.style import BLUE, GREY, ORANGE, Series, canvas, frame, lines
from bench.harness.tables import Section, number, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave
from bench.peers.checkpoints import checkpoint
from bench.systems.engine_alone import engine_alone

COLOURS = (BLUE, ORANGE)
GOAL = 0.8


class BeamsPlan(Plan, frozen=True):
    models: tuple[str, ...] = ("tiny", "25M")
    widths: tuple[int, ...] = (2, 4, 8)
    at_once: int = 4
    """Requests in flight."""
    requests: int = 8
    prompt: int = 128
    tokens: int = 96
    repeats: int = 3


class BeamsPoint(msgspec.Struct, frozen=True):
    model: str
    width: int
    sampled: float
    """Tokens/s of all sampled sequences: median of the rounds."""
    speed: float
    """Speed of beams divided by that of as many sampled sequences: median of the rounds' ratios."""


class BeamsResult(BeamsPlan, frozen=True, kw_only=True):
    points: list[BeamsPoint]

    def of(self, model: str) -> list[BeamsPoint]:
        """The points of a model, by width."""
        return [point for point in self.points if point.model == model]


def measure(plan: BeamsPlan, logs: Path, step: Step) -> BeamsResult:
    points = []
    for model in plan.models:
        settings = engine_settings(plan.threads)
        with engine_alone(checkpoint(model), settings, logs) as engine:
            for width in plan.widths:
                sides = {
                    f"{model}, {what} {width}": (engine, _load(plan, width, beams=beams))
                    for what, beams in (("n =", False), ("beams:", True))
                }
                sampled, searched = interleave(sides, plan.repeats, step)
                speed = statistics.median(map(rate, sampled))
                points.append(BeamsPoint(model, width, speed, ratio(searched, sampled)))
    return BeamsResult(**asdict(plan), points=points)


def _load(plan: BeamsPlan, width: int, *, beams: bool) -> Load:
    prompts = python_prompts(TINY, plan.requests, plan.prompt)
    return Load(
        [PlannedRequest(prompt, plan.tokens, temperature=1.0, n=width, beams=beams) for prompt in prompts],
        plan.at_once,
        salt=f"{width}{beams}",
    )


def section(result: BeamsResult) -> Section:
    worst = min(result.points, key=lambda point: point.speed)
    return Section(
        "Beam search",
        f"The engine in process: {result.at_once} requests at a time, {result.tokens} output tokens after "
        f"{result.prompt} prompt tokens; beam search of width w compared with n = w sampled sequences, in turns. No "
        "token ends a beam, so both compute the same number of tokens.",
        [
            f"Beam search has at least **{worst.speed:.2f}×** the speed of as many sampled sequences ({worst.model}, "
            f"width {worst.width}; goal: {GOAL}×)."
        ],
        [
            table(
                "speed of beam search / n = w | " + " | ".join(f"w = {width}" for width in result.widths),
                [
                    f"{model} | " + " | ".join(f"{point.speed:.2f}×" for point in result.of(model))
                    for model in result.models
                ],
            ),
            table(
                "tokens/s with n = w | " + " | ".join(f"w = {width}" for width in result.widths),
                [
                    f"{model} | " + " | ".join(number(point.sampled) for point in result.of(model))
                    for model in result.models
                ],
            ),
        ],
    )


def draw(result: BeamsResult) -> Figure:
    about = f"Speed divided by that of as many sampled sequences, {result.at_once} requests at a time."
    figure, ((axes,),) = canvas((1, 1), (7, 4.6), "Beam search", about)
    shown = [
        Series(model, colour, [point.speed for point in result.of(model)])
        for model, colour in zip(result.models, COLOURS, strict=False)
    ]
    lines(axes, result.widths, shown)
    frame(axes, "Width w compared with n = w", "ratio of speeds", x="width", grid="y")
    axes.axhline(GOAL, color=GREY, linestyle=":", linewidth=1)
    return figure


QUICK = BeamsPlan(("tiny",), (2,), at_once=2, requests=2, prompt=16, tokens=6, repeats=1)
TOPIC = Topic(BeamsPlan(), QUICK, measure, BeamsResult, section, draw)

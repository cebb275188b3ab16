"""The gain of speculation: speed with and without drafts, by kind of text and batch size."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec.structs import asdict, replace
from tokenizers import Tokenizer

from bench.harness.close_ratios import CLOSE, Comparison, measure_close_again, middle_half
from bench.harness.load import Load, PlannedRequest, Run, System
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import sustained_rate
from bench.harness.style import BLUE, GREY, ORANGE, SOFT, TEAL, Series, canvas, frame, lines
from bench.harness.tables import Section, Table, number, table
from bench.harness.topic import Step, Topic, engine_settings
from bench.systems.engine_alone import engine_alone
from bench.topics import drafters
from bench.topics.drafters import DrafterPlan, DrafterPoint

REPEATED = "def add_one(x):\n    return x + 1\n\n\ndef add_two(x):\n    return x + 2\n\n\n" * 4
WRONG_EVERY = 25
"""One in this many tokens that the caller expects is wrong."""
REPETITIVE, EDIT, CODE, SAMPLED, NOISE = "repetitive", "an edit", "code", "code, temperature 0.8", "noise"
KINDS: Mapping[str, str] = {
    REPETITIVE: "functions that hardly differ, greedy",
    EDIT: f"the caller expects the output, one token in {WRONG_EVERY} is wrong; code, greedy",
    CODE: "Python's standard library, greedy",
    SAMPLED: "the same, sampled",
    NOISE: "the same at temperature 1.5, where the output does not repeat",
}
DRAFTED = (REPETITIVE, CODE, SAMPLED, NOISE)
"""Kinds measured with a draft model. EDIT is left out, because drafts of the caller take precedence over it."""
COLOURS = dict(zip(KINDS, (TEAL, BLUE, ORANGE, SOFT, GREY), strict=True))


class SpeculationPlan(DrafterPlan, frozen=True):
    batches: tuple[int, ...] = (1, 2, 4, 8)
    prompt: int = 200
    tokens: int = 160
    spread: int = 40
    """Output lengths vary by this much. With equal lengths all sequences of a batch would start and end together
    without drafts, but not with drafts."""
    requests: int = 4
    """Consecutive requests per slot of the batch."""
    starts: int = 3
    """Starts of the engine for cells that are measured again."""
    again: int = 4
    """Rounds of each such cell in each start."""


class SpeculationPoint(msgspec.Struct, frozen=True):
    kind: str
    batch: int
    plain: float
    """Tokens/s without drafts: median of the rounds."""
    speed_up: float
    """Median of the rounds' ratios."""
    steps_saved: float
    """Fraction of the steps of the run without drafts that drafts saved."""
    ratios: list[float] = []
    """Ratios by round. Empty in results of older versions."""

    @property
    def middle_half(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        return middle_half(self.ratios or [self.speed_up])

    @property
    def cell(self) -> str:
        low, high = self.middle_half
        return f"{self.speed_up:.2f}×" + (f" ({low:.2f}–{high:.2f})" if self.ratios else "")


class SpeculationResult(SpeculationPlan, frozen=True, kw_only=True):
    points: list[SpeculationPoint]
    drafters: list[DrafterPoint] = msgspec.field(default_factory=list)
    """Results of a larger model, without and with a draft model."""

    def of(self, kind: str) -> list[SpeculationPoint]:
        """The points by batch size."""
        return [point for point in self.points if point.kind == kind]

    def speed_up(self, kind: str) -> float:
        """Speed-up of a single stream."""
        return self.of(kind)[0].speed_up


def measure(plan: SpeculationPlan, logs: Path, step: Step) -> SpeculationResult:
    start = partial(engine_alone, TINY, engine_settings(plan.threads), logs)
    cells: dict[tuple[str, int], Comparison] = {}
    with start() as engine:
        for batch in plan.batches:
            for kind in KINDS:
                cell = _cell(kind, Load(_requests(kind, batch * plan.requests, plan, engine), batch), plan.drafts)
                cell.measure(engine, plan.repeats, step)
                cells[kind, batch] = cell
    measure_close_again(cells.values(), start, plan.starts, plan.again, step)
    points = [_point(kind, batch, cell) for (kind, batch), cell in cells.items()]
    found = []
    with drafters.engine(plan, logs) as engine:
        for batch in plan.drafter_batches:
            for kind in DRAFTED:
                requests = _requests(kind, batch * plan.requests, plan, engine)
                found += drafters.points(engine, plan, kind, Load(requests, batch), step)
    return SpeculationResult(**asdict(plan), points=points, drafters=found)


def _requests(kind: str, count: int, plan: SpeculationPlan, engine: System) -> list[PlannedRequest]:
    prompts = python_prompts(TINY, count, plan.prompt)
    if kind == REPETITIVE:
        ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(REPEATED).ids
        prompts = [(ids[i:] + ids[:i])[: plan.prompt] for i in range(count)]
    temperature = {SAMPLED: 0.8, NOISE: 1.5}.get(kind, 0.0)
    requests = [
        PlannedRequest(prompt, plan.tokens + 37 * i % (2 * plan.spread + 1) - plan.spread, temperature=temperature)
        for i, prompt in enumerate(prompts)
    ]
    if kind != EDIT:
        return requests
    outputs = [
        trace.tokens for trace in engine.run(Load(requests, count, salt="expected", settings=_settings(0))).traces
    ]
    return [replace(request, expected=_with_errors(tokens)) for request, tokens in zip(requests, outputs, strict=True)]


def _with_errors(tokens: Sequence[int]) -> list[int]:
    return [token + 1 if i % WRONG_EVERY == WRONG_EVERY - 1 else token for i, token in enumerate(tokens)]


def _settings(drafts: int) -> dict[str, int]:
    return {"max_draft_tokens": drafts, "max_draft_batch": 4096 if drafts else 0}


def _cell(kind: str, load: Load, drafts: int) -> Comparison:
    name = f"{kind}, {load.width} at a time"
    plain, drafted = (replace(load, settings=_settings(count)) for count in (0, drafts))
    return Comparison((f"{name}, plain", plain), (f"{name}, drafts", drafted))


def _point(kind: str, batch: int, cell: Comparison) -> SpeculationPoint:
    _check_tokens(kind, cell.base, cell.other)
    saved = 1 - statistics.median(b.steps / a.steps for a, b in zip(cell.base, cell.other, strict=True))
    speed, ratios = statistics.median(map(sustained_rate, cell.base)), cell.ratios
    return SpeculationPoint(kind, batch, speed, statistics.median(ratios), saved, ratios)


def _check_tokens(kind: str, plain: Sequence[Run], drafted: Sequence[Run]) -> None:
    for a, b in zip(plain, drafted, strict=True):
        if [trace.tokens for trace in a.traces] != [trace.tokens for trace in b.traces]:
            raise RuntimeError(f"{kind}: drafts have changed the tokens")


def section(result: SpeculationResult) -> Section:
    worst = min(result.points, key=lambda point: point.speed_up)
    limit = max((batch for batch in result.batches if _slowest(result, batch) >= 1), default=None)
    return Section(
        "Speculation",
        f"The tiny model, with the engine in process: {result.tokens} ± {result.spread} output tokens after "
        f"{result.prompt} prompt tokens, with up to {result.drafts} draft tokens per step and without, in turns; both "
        "return the same tokens. Draft tokens come from prompt lookup, except for the edit. Speed is measured until "
        "the last request has been submitted. "
        + _about_rounds(result)
        + " ".join(f"*{kind[0].upper()}{kind[1:]}*: {about}." for kind, about in KINDS.items()),
        [
            f"One stream: repetitive text **{result.speed_up(REPETITIVE):.2f}×** (goal: 1.5×), an edit "
            f"**{result.speed_up(EDIT):.2f}×**, code **{result.speed_up(CODE):.2f}×**.",
            f"The lowest ratio is **{worst.speed_up:.2f}×** ({worst.kind}, {worst.batch} at a time; {_rounds(worst)}"
            "goal: 0.95×). "
            + (
                f"No kind of text is slower up to {limit} at a time."
                if limit
                else "Some kind of text is slower at every batch size."
            ),
        ],
        [
            _table(result, "speed / without drafts", lambda point: point.cell),
            _table(result, "steps saved, %", lambda point: number(100 * point.steps_saved)),
            _table(result, "tokens/s without drafts", lambda point: number(point.plain)),
            *drafters.tables(result.drafters, result.copies),
        ],
    )


def _about_rounds(result: SpeculationResult) -> str:
    if not any(point.ratios for point in result.points):
        return ""
    return (
        f"In brackets are the quartiles of the rounds' ratios. Cells below {CLOSE:.2f}× after {result.repeats} rounds "
        f"are measured in {result.again} more rounds in each of {result.starts} more starts of the engine. "
    )


def _rounds(point: SpeculationPoint) -> str:
    low, high = point.middle_half
    return f"{len(point.ratios)} rounds, half of them {low:.2f} to {high:.2f}; " if point.ratios else ""


def _slowest(result: SpeculationResult, batch: int) -> float:
    return min(point.speed_up for point in result.points if point.batch == batch)


def _table(result: SpeculationResult, title: str, cell: Callable[[SpeculationPoint], str]) -> Table:
    head = " | ".join(f"{batch} at a time" for batch in result.batches)
    return table(f"{title} | {head}", [f"{kind} | " + " | ".join(map(cell, result.of(kind))) for kind in KINDS])


def draw(result: SpeculationResult) -> Figure:
    about = (
        f"Speed with up to {result.drafts} draft tokens per step, divided by that without. The tokens are the same. "
        "Bars: quartiles of the rounds."
    )
    figure, ((left, right),) = canvas((1, 2), (12, 4.8), "Speculation", about)
    for axes, title, value in (
        (left, "Speed", lambda point: point.speed_up),
        (right, "Steps saved", lambda point: 100 * point.steps_saved),
    ):
        axes.set_xscale("log", base=2)
        lines(axes, result.batches, [Series(kind, COLOURS[kind], list(map(value, result.of(kind)))) for kind in KINDS])
        frame(axes, title, "ratio of speeds" if axes is left else "%", x="sequences", grid="y")
    _spreads(left, result)
    left.axhline(1.0, color=GREY, linestyle=":", linewidth=1)
    return figure


def _spreads(axes: Axes, result: SpeculationResult) -> None:
    for point in result.points:
        axes.vlines(point.batch, *point.middle_half, color=COLOURS[point.kind], linewidth=6, alpha=0.3)


QUICK = SpeculationPlan(
    (1, 2), prompt=32, tokens=8, spread=2, requests=1, repeats=1, drafter_batches=(1,), copies=1, starts=1, again=1
)
TOPIC = Topic(SpeculationPlan(), QUICK, measure, SpeculationResult, section, draw)

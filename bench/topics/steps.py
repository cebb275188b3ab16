"""The parts of a step's time: kernels by kind, and the engine's own work."""

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from bench.harness.children import SystemProcess
from bench.harness.load import Load, PlannedRequest
from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, GREY, INK, LEGEND, ORANGE, SOFT, TEAL, canvas, frame, note
from bench.harness.tables import Section, number, short, table
from bench.harness.topic import Plan, Step, Topic, engine_settings
from bench.peers.checkpoints import TINY_NAME, checkpoint
from bench.systems.step_profile import ATTENTION, OTHERS, PARTS, PRODUCTS, StepTimes
from sluice.launch.environment import child_environment

ENGINES: Mapping[str, Mapping[str, str]] = {
    "torch, float32": {"backend": "torch"},
    "OpenVINO, float32": {"backend": "openvino"},
    "OpenVINO, int8": {"backend": "openvino", "quantize": "int8"},
}
COLOURS = (BLUE, ORANGE, TEAL, GREY, SOFT, INK)
KERNELS = (PRODUCTS, ATTENTION, OTHERS)


class StepsPlan(Plan, frozen=True):
    model: str = "25M"
    widths: tuple[int, ...] = (1, 32)
    """Numbers of generating sequences."""
    prompt: int = 1024
    """Length of the long prompts, which run one after the other."""
    prompts: int = 4
    tokens: int = 64
    repeats: int = 3


class Profile(msgspec.Struct, frozen=True):
    engine: str
    work: str
    parts: dict[str, float]
    """Milliseconds, by part."""

    @property
    def own(self) -> float:
        """Milliseconds of everything except the kernels."""
        return sum(ms for part, ms in self.parts.items() if part not in KERNELS)


class StepsResult(StepsPlan, frozen=True, kw_only=True):
    profiles: list[Profile]

    def of(self, work: str) -> list[Profile]:
        return [found for found in self.profiles if found.work == work]

    @property
    def works(self) -> list[str]:
        return list(dict.fromkeys(found.work for found in self.profiles))


def measure(plan: StepsPlan, logs: Path, step: Step) -> StepsResult:
    works = _works(plan)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        children = {name: stack.enter_context(_child(name, plan, logs)) for name in ENGINES}
        # The first round warms up.
        for number_of_round in range(plan.repeats + 1):
            for name, child in children.items():
                for work, (load, whole) in works.items():
                    salted = msgspec.structs.replace(load, salt=f"{work}-{number_of_round}")
                    steps = child.query(salted, StepTimes).steps
                    if number_of_round:
                        found.setdefault((name, work), []).append(_summary(steps, len(load.requests), whole=whole))
                step(f"{name}, round {number_of_round} of {plan.repeats}")
    profiles = [Profile(name, work, _medians(rounds)) for (name, work), rounds in found.items()]
    return StepsResult(**msgspec.structs.asdict(plan), profiles=profiles)


def _works(plan: StepsPlan) -> dict[str, tuple[Load, bool]]:
    """Loads by title, and whether the times of all steps of a request are summed (else: the mean of generation
    steps)."""
    prompts = python_prompts(TINY, max(plan.widths), 128)
    long = [PlannedRequest(prompt, 1) for prompt in python_prompts(TINY, plan.prompts, plan.prompt)]
    generation = {
        f"a step of {width} sequence{'' if width == 1 else 's'}": (
            Load([PlannedRequest(prompt, plan.tokens) for prompt in prompts[:width]], width),
            False,
        )
        for width in plan.widths
    }
    return generation | {f"a prompt of {plan.prompt:,} tokens": (Load(long, 1), True)}


def _child(name: str, plan: StepsPlan, logs: Path) -> SystemProcess:
    settings: dict[str, Any] = engine_settings(plan.threads, model=checkpoint(plan.model), **ENGINES[name])
    flags = [text for key, value in settings.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return SystemProcess(name, "bench.systems.step_profile", flags, logs / f"{name}.log", child_environment())


def _summary(steps: list[dict[str, float]], requests: int, *, whole: bool) -> dict[str, float]:
    if whole:
        return {part: sum(each.get(part, 0.0) for each in steps) / requests for part in PARTS}
    # Prompts come first, and the last steps have fewer sequences.
    middle = steps[len(steps) // 4 : -max(2, len(steps) // 8)]
    if not middle:
        raise RuntimeError(f"{len(steps)} steps are too few")
    return {part: statistics.fmean(each.get(part, 0.0) for each in middle) for part in PARTS}


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(each[part] for each in rounds) for part in PARTS}


def section(result: StepsResult) -> Section:
    return Section(
        "Parts of a step's time",
        f"The engine in process, {result.model} Qwen3 shape with random weights, milliseconds. A step is one in which "
        "all sequences generate; a prompt is the sum of its steps. OpenVINO's profiling of its nodes adds a little "
        "time; *other kernels* is the time of its call without products and attention.",
        [
            f"{work[0].upper()}{work[1:]}: {number(last.own)} of {number(sum(last.parts.values()))} ms with "
            f"{last.engine} are the engine's own work; torch takes {number(sum(first.parts.values()))} ms."
            for work in result.works
            for first, last in [(result.of(work)[0], result.of(work)[-1])]
        ],
        [
            table(
                f"{work} | " + " | ".join(PARTS) + " | whole",
                (
                    f"{found.engine} | "
                    + " | ".join(number(found.parts[part]) for part in PARTS)
                    + f" | {number(sum(found.parts.values()))}"
                    for found in result.of(work)
                ),
            )
            for work in result.works
        ],
    )


def draw(result: StepsResult) -> Figure:
    about = f"{result.model} shape, {result.threads} threads: milliseconds by part"
    works = result.works
    figure, grid = canvas((len(works), 1), (10, 1.2 + 1.6 * len(works)), "Parts of a step's time", about)
    for (axes,), work in zip(grid, works, strict=True):
        found = result.of(work)
        left = [0.0] * len(found)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            values = [each.parts[part] for each in found]
            axes.barh(range(len(found)), values, 0.66, left, color=colour, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for row, whole in enumerate(left):
            note(axes, f"{short(whole)} ms", (whole, row), (5, 0), ha="left", va="center")
        axes.set_yticks(range(len(found)), [each.engine for each in found])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.45 * max(left))
        frame(axes, work, bare="bottom")
    grid[0][0].legend(loc="center right", **LEGEND)
    return figure


QUICK = StepsPlan(model=TINY_NAME, widths=(1, 2), prompt=32, tokens=16, repeats=1)
TOPIC = Topic(StepsPlan(threads=2), QUICK, measure, StepsResult, section, draw)

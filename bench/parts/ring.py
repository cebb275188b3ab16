"""What the ring costs: the engine alone against the same engine behind router, detokenizers and gRPC."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.load import Ask, Load, Run, System
from bench.prompts import python_prompts
from bench.rounds import Step, interleave
from bench.stats import Figures, figures, ratio
from bench.systems.engine_alone import engine_alone
from bench.systems.through_ring import through_ring


class Shape(msgspec.Struct, frozen=True):
    """So many streams at once, all alike."""

    streams: int
    prompt_tokens: int
    output_tokens: int


class ModelPlan(msgspec.Struct, frozen=True):
    """One model's measurement."""

    title: str
    model: Path
    shapes: list[Shape]
    repeats: int
    engine: Mapping[str, Any]
    """The engine's settings."""

    @property
    def steps(self) -> int:
        """Runs to come."""
        return 2 * len(self.shapes) * (1 + self.repeats)


class Plan(msgspec.Struct, frozen=True):
    """All models."""

    models: list[ModelPlan]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return sum(model.steps for model in self.models)


class Point(msgspec.Struct, frozen=True):
    """Both systems under one shape."""

    shape: Shape
    alone: Figures
    ring: Figures
    ratio: float
    """Tokens per second through the ring by those of the engine alone: median of the rounds' ratios."""


class Points(msgspec.Struct, frozen=True):
    """One model."""

    title: str
    points: list[Point]


class Result(msgspec.Struct, frozen=True):
    """All models."""

    models: list[Points]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """One model after the other."""
    return Result([_points(model, logs, step) for model in plan.models])


def _points(plan: ModelPlan, logs: Path, step: Step) -> Points:
    """Both systems stay up and take turns."""
    with engine_alone(plan.model, plan.engine, logs) as alone, through_ring(plan.model, plan.engine, logs) as ring:
        points = []
        for shape in plan.shapes:
            prompts = python_prompts(plan.model, shape.streams, shape.prompt_tokens)
            load = Load([Ask(prompt, shape.output_tokens) for prompt in prompts], width=shape.streams)
            systems: list[System[Run]] = [alone, ring]
            of_alone, of_ring = interleave([(system, load) for system in systems], plan.repeats, step)
            points.append(Point(shape, figures(of_alone), figures(of_ring), ratio(of_ring, of_alone)))
    return Points(plan.title, points)

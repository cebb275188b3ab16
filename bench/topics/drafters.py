"""A draft model compared with prompt lookup: accepted draft tokens and gain."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from bench.harness.load import Load, Run, System
from bench.harness.models import TINY, write_deepened_tiny
from bench.harness.stats import sustained_ratio
from bench.harness.tables import Table, number, table
from bench.harness.topic import Plan, Step, engine_settings, interleave
from bench.systems.engine_alone import engine_alone

LOOKUP, MODEL = "lookup", "draft model"
STRENGTH = 0.1
"""Strength of the added layers of the larger model."""


class DrafterPlan(Plan, frozen=True, kw_only=True):
    drafts: int = 8
    repeats: int = 3
    drafter_batches: tuple[int, ...] = (1, 4)
    copies: int = 4
    """Copies of the tiny model's layers that are added to make the larger model."""


class DrafterPoint(msgspec.Struct, frozen=True):
    kind: str
    batch: int
    drafter: str
    speed_up: float
    """Speed divided by that without drafts: median of the rounds' ratios."""
    steps_saved: float
    """Fraction of the steps of the run without drafts that drafts saved."""
    accepted: float
    """Fraction of the draft tokens that were accepted."""


def engine(plan: DrafterPlan, logs: Path) -> Any:
    """The larger model, with the tiny one as its draft model."""
    folder = write_deepened_tiny(logs / "deepened", plan.copies, STRENGTH)
    return engine_alone(folder, engine_settings(plan.threads, draft_model=TINY), logs)


def points(system: System, plan: DrafterPlan, kind: str, load: Load, step: Step) -> list[DrafterPoint]:
    drafts = {"max_draft_tokens": plan.drafts, "max_draft_batch": 4096}
    settings = {
        "plain": {"max_draft_batch": 0},
        LOOKUP: {**drafts, "draft_model": None},
        MODEL: drafts,
    }
    sides = {
        f"a larger model, {kind}, {load.width} at a time, {name}": (system, replace(load, settings=own))
        for name, own in settings.items()
    }
    plain, *others = interleave(sides, plan.repeats, step)
    return [_point(kind, load.width, name, plain, runs) for name, runs in zip((LOOKUP, MODEL), others, strict=True)]


def _point(kind: str, batch: int, drafter: str, plain: Sequence[Run], runs: Sequence[Run]) -> DrafterPoint:
    for a, b in zip(plain, runs, strict=True):
        if [trace.tokens for trace in a.traces] != [trace.tokens for trace in b.traces]:
            raise RuntimeError(f"{kind}: drafts of the {drafter} have changed the tokens")
    saved = 1 - statistics.median(b.steps / a.steps for a, b in zip(plain, runs, strict=True))
    accepted = sum(run.accepted for run in runs) / max(1, sum(run.drafted for run in runs))
    return DrafterPoint(kind, batch, drafter, sustained_ratio(runs, plain), saved, accepted)


def tables(found: Sequence[DrafterPoint], copies: int) -> list[Table]:
    """Empty if nothing was measured."""
    rows = [
        f"{point.kind} | {point.batch} | {point.drafter} | {number(100 * point.accepted)} | "
        f"{number(100 * point.steps_saved)} | {point.speed_up:.2f}×"
        for point in found
    ]
    head = (
        f"an artificial pair: the tiny model with {copies} weak copies of its layers, and the tiny model as draft "
        "model | in flight | drafts by | accepted, % | steps saved, % | speed / without drafts"
    )
    return [table(head, rows)] if rows else []

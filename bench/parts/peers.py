"""Beside it: transformers' `generate` and its continuous batching, on the same checkpoint and the same requests."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from bench.children import Child
from bench.load import Ask, Load, Run, System
from bench.prompts import python_prompts
from bench.rounds import Step, interleave
from bench.stats import Figures, figures, ratio
from bench.systems.engine_alone import engine_alone
from bench.systems.through_ring import through_ring

BASE = "transformers generate"


class Work(msgspec.Struct, frozen=True):
    """Requests of one kind. Output lengths are drawn evenly from `shortest` to `longest`."""

    title: str
    requests: int
    width: int
    prompt_tokens: int
    shortest: int
    longest: int

    def load(self, model: Path) -> Load:
        """The same requests each time."""
        lengths = random.Random(0)
        prompts = python_prompts(model, self.requests, self.prompt_tokens)
        asks = [Ask(prompt, lengths.randint(self.shortest, self.longest)) for prompt in prompts]
        return Load(asks, self.width, ids=True)


class Plan(msgspec.Struct, frozen=True):
    """What all systems have to do."""

    model: Path
    works: list[Work]
    repeats: int
    threads: int
    engine: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Runs to come."""
        return 4 * len(self.works) * (1 + self.repeats)


class Entry(msgspec.Struct, frozen=True):
    """One system under one kind of work."""

    system: str
    figures: Figures
    ratio: float
    """Tokens per second by those of transformers' generate: median of the rounds' ratios."""
    same: int
    """Requests whose greedy tokens are those of transformers' generate."""


class Table(msgspec.Struct, frozen=True):
    """All systems under one kind of work."""

    work: Work
    entries: list[Entry]


class Result(msgspec.Struct, frozen=True):
    """All kinds of work."""

    tables: list[Table]


def measure(plan: Plan, logs: Path, step: Step) -> Result:
    """All systems stay up and take turns."""
    width = max(work.width for work in plan.works)
    with ExitStack() as stack:
        systems: list[System[Run]] = [
            stack.enter_context(_transformers(BASE, "generate", plan, width, logs)),
            stack.enter_context(_transformers("transformers continuous batching", "continuous", plan, width, logs)),
            stack.enter_context(engine_alone(plan.model, plan.engine, logs)),
            stack.enter_context(through_ring(plan.model, plan.engine, logs)),
        ]
        return Result([_table(work, systems, plan, step) for work in plan.works])


def _transformers(name: str, mode: str, plan: Plan, width: int, logs: Path) -> Child[Run]:
    options = [str(plan.model), mode, "--threads", str(plan.threads), "--width", str(width)]
    return Child(name, "bench.systems.transformers_peer", options, logs / f"{mode}.log", Run)


def _table(work: Work, systems: Sequence[System[Run]], plan: Plan, step: Step) -> Table:
    load = work.load(plan.model)
    runs = interleave([(system, load) for system in systems], plan.repeats, step)
    base = runs[0]
    entries = [
        Entry(system.name, figures(own), ratio(own, base), _same(own[0], base[0]))
        for system, own in zip(systems, runs, strict=True)
    ]
    return Table(work, entries)


def _same(run: Run, base: Run) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(run.traces, base.traces, strict=True))

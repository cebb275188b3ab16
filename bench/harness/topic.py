"""A topic: one question, from how much is measured over the result to words and a picture; and fair rounds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.harness.load import Load, Run, System
from bench.harness.stats import Figures
from bench.harness.tables import Section, number, numbers

WARM_TOKENS = 1024
Step = Callable[[str], None]
"""Progress: called once per run with what was done."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    threads: int = 1


class Topic(NamedTuple):
    plan: Plan
    quick: Plan
    """The least that shows whether it works."""
    measure: Callable[[Any, Path, Step], Any]
    """(plan, folder for logs and model files, step) → the result."""
    result: type[msgspec.Struct]
    section: Callable[[Any], Section]
    draw: Callable[[Any], Figure]

    def run(self, name: str, plan: Plan, folder: Path, progress: Progress) -> Any:
        """Measures and shows what was done last."""
        task = progress.add_task(f"{name}: starting", total=None)
        result = self.measure(plan, folder, lambda done: progress.update(task, description=f"{name}: {done}"))
        progress.stop_task(task)
        return result


def progress_lines(console: Console) -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)


def engine_settings(threads: int, **others: Any) -> dict[str, Any]:
    return {"threads": threads, "kv_cache_tokens": 65536, **others}


def speed_cells(figures: Figures, ratio: str) -> str:
    """Tokens/s (range), the ratio as it is, first token and inter-token times."""
    slowest, fastest = figures.tokens_per_second_range
    rate = f"{number(figures.tokens_per_second)} ({number(slowest)}–{number(fastest)})"
    first = numbers(figures.first_token_p50, figures.first_token_p99)
    return f"{rate} | {ratio} | {first} | {numbers(figures.inter_token_p50, figures.inter_token_p99)}"


def interleave(sides: Mapping[str, tuple[System, Load]], repeats: int, step: Step) -> list[list[Run]]:
    """Runs of each system under its load, after a short uncounted round, each with a prefix-cache domain of its own."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for name, (system, load) in sides.items():
        system.run(_brief(load))
        step(f"{name}, warming up")
    for repeat in range(repeats):
        # Every second round goes backwards, so that drift of the machine affects all systems alike.
        for name in sides if repeat % 2 == 0 else reversed(runs):
            system, load = sides[name]
            runs[name].append(system.run(replace(load, salt=f"{load.salt}-{repeat}")))
            step(f"{name}, round {repeat + 1} of {repeats}")
    return list(runs.values())


def _brief(load: Load) -> Load:
    """The first `width` requests, no longer than WARM_TOKENS, with two tokens each: the same shapes, little time."""
    asks = [
        replace(ask, prompt=ask.prompt[:WARM_TOKENS], max_tokens=min(ask.max_tokens, 2))
        for ask in load.asks[: load.width]
    ]
    return replace(load, asks=asks, salt=f"{load.salt}-warm")

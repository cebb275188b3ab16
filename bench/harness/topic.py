"""A topic measures the answer to one question: plan, measurement, result, page section and plot; and fair rounds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.harness.load import Load, Run, System
from bench.harness.stats import Figures
from bench.harness.tables import Section, number, numbers

WARM_TOKENS = 1024
"""Maximum length of a prompt in the warm-up."""
Step = Callable[[str], None]
"""Progress callback: called after each run with a description of it."""
Keep = Callable[[Any], None]
"""Stores the result so far."""


class Steps(Protocol):
    """A `Step` that can be told the result so far, so that it is not lost if a long measurement is stopped."""

    def __call__(self, done: str, so_far: Any = None) -> None: ...


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a measurement."""

    threads: int = 1


class Topic(NamedTuple):
    plan: Plan
    quick: Plan
    """Smallest sizes, to test that the measurement works."""
    measure: Callable[[Any, Path, Steps], Any]
    """Maps (plan, folder for logs and model files, step) to the result."""
    result: type[msgspec.Struct]
    section: Callable[[Any], Section]
    draw: Callable[[Any], Figure]

    def run(self, name: str, plan: Plan, folder: Path, progress: Progress, keep: Keep | None = None) -> Any:
        """Measures, and shows the progress."""
        task = progress.add_task(f"{name}: starting", total=None)

        def step(done: str, so_far: Any = None) -> None:
            progress.update(task, description=f"{name}: {done}")
            if keep and so_far is not None:
                keep(so_far)

        result = self.measure(plan, folder, step)
        progress.stop_task(task)
        return result


def progress_lines(console: Console) -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)


def engine_settings(threads: int, **others: Any) -> dict[str, Any]:
    return {"threads": threads, "kv_cache_tokens": 65536, **others}


def speed_cells(figures: Figures, ratio: str) -> str:
    """Cells of a table row: tokens/s (range), `ratio`, time to first token, time between tokens."""
    slowest, fastest = figures.tokens_per_second_range
    rate = f"{number(figures.tokens_per_second)} ({number(slowest)}–{number(fastest)})"
    first = numbers(figures.first_token_p50, figures.first_token_p99)
    return f"{rate} | {ratio} | {first} | {numbers(figures.inter_token_p50, figures.inter_token_p99)}"


def interleave(sides: Mapping[str, tuple[System, Load]], repeats: int, step: Step) -> list[list[Run]]:
    """Runs each system with its load, `repeats` times in turns, after a short warm-up that is not counted. Each run has
    a different prefix cache salt."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for name, (system, load) in sides.items():
        system.run(_brief(load))
        step(f"{name}, warming up")
    for repeat in range(repeats):
        # Every second round is in reverse order, so that drift of the machine affects all systems equally.
        for name in sides if repeat % 2 == 0 else reversed(runs):
            system, load = sides[name]
            runs[name].append(system.run(replace(load, salt=f"{load.salt}-{repeat}")))
            step(f"{name}, round {repeat + 1} of {repeats}")
    return list(runs.values())


def _brief(load: Load) -> Load:
    """A warm-up with the same shapes that takes little time: the first `width` requests, with prompts of at most
    WARM_TOKENS and outputs of two tokens."""
    requests = [
        replace(request, prompt=request.prompt[:WARM_TOKENS], max_tokens=min(request.max_tokens, 2))
        for request in load.requests[: load.width]
    ]
    return replace(load, requests=requests, salt=f"{load.salt}-warm")

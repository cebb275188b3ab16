"""Streams of every kind while services are killed: with deaths in a quick row, and as a soak."""

from pathlib import Path

from bench.deaths.result import Plan, Result
from bench.deaths.run import measure as run
from bench.rounds import Step

__all__ = ["Plan", "Result", "measure"]


def measure(plan: Plan, _: Path, step: Step) -> Result:
    """One ring, one run."""
    said, steps = "", 0

    def tell(what: str, done: int, _: int) -> None:
        nonlocal said, steps
        said, before = what, steps if what == said else 0
        steps = done
        for _ in range(done - before):
            step(what)

    return run(plan, tell)

"""Streams over a ring whose services are killed: python -m tests.chaos.kills --streams 64 --kills 50

Ends with one line that says what became of them; exit status 1 when one failed or differs from its undisturbed self.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.deaths.kills import KillPlan, measure, summary


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    defaults = KillPlan()
    for name, meaning in (("streams", "at a time"), ("kills", "in all"), ("seed", "of what dies when")):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help=meaning)
    parser.add_argument("--seconds", type=float, default=defaults.seconds_between, help="from kill to kill")
    given = parser.parse_args()
    plan = KillPlan(given.streams, given.kills, given.seconds, seed=given.seed)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=plan.steps)
        result = measure(plan, Path(), lambda what: progress.update(task, advance=1, description=what))
    for fault in result.faults:
        console.print(fault, markup=False)
    console.print(summary(result), highlight=False, soft_wrap=True)
    raise SystemExit(1 if result.failed or result.wrong else 0)


if __name__ == "__main__":
    main()

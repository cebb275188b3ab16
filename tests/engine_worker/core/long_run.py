"""Long runs of the engine's state machines: python -m tests.engine_worker.core.long_run --steps 1000000

Runs until at least that many rules and that many engine steps have been executed, and prints their numbers in one line.
On a violation it prints the shortest sequence of rules that leads to it, and exits with status 1.
"""

import argparse
import random
import time
import traceback
from collections.abc import Sequence
from itertools import cycle

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.engine_worker.core.machine import EngineMachine
from tests.engine_worker.core.machine_ring import RingMachine

MACHINES = {"engine": EngineMachine, "ring": RingMachine}
ROUND = settings(
    max_examples=50,
    stateful_step_count=100,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


class Count:
    """The rules and engine steps that the machines have executed so far."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self.rules = 0
        self.engine_steps = 0
        self.machines = 0
        self._progress = progress
        self._task = progress.add_task("machines", total=steps)

    @property
    def least(self) -> int:
        return min(self.rules, self.engine_steps)

    def add(self, rules: int, engine_steps: int) -> None:
        self.rules += rules
        self.engine_steps += engine_steps
        self._progress.update(self._task, completed=self.least, description=f"{self.machines} machines")


def counting(machine: type[EngineMachine], count: Count) -> type[EngineMachine]:
    """The machine, which adds its rules and steps to `count`."""

    class CountingMachine(machine):
        def __init__(self) -> None:
            super().__init__()
            count.machines += 1

        def count(self, rules: int, engine_steps: int) -> None:
            count.add(rules, engine_steps)

    return CountingMachine


def run(steps: int, start: int, console: Console, names: Sequence[str] = tuple(MACHINES)) -> bool:
    """Whether all invariants held. Rounds have the seeds `start`, `start` + 1, …; the first failure ends the run.
    `names`: of the machines, which take turns."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began, number, passed = time.monotonic(), start, True
    with Progress(*columns, console=console) as progress:
        count = Count(progress, steps)
        machines = cycle([counting(MACHINES[name], count) for name in names])
        while passed and count.least < steps:
            machine = next(machines)
            try:
                run_state_machine_as_test(seed(number)(machine), settings=ROUND)
            except Exception:  # noqa: BLE001 - any exception is a violation
                passed = False
                console.print(traceback.format_exc(), markup=False, highlight=False)
            number += 1
    console.print(
        f"{'everything held' if passed else 'VIOLATION in the last round'}: {count.rules:,} rules and "
        f"{count.engine_steps:,} engine steps of {count.machines:,} machines, seeds {start} to {number - 1}, "
        f"{time.monotonic() - began:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine_worker.core.long_run", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="least number of rules and of engine steps")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first round; default: random")
    parser.add_argument("--machine", choices=MACHINES, help="only this one; default: all in turn")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    start = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    names = tuple(MACHINES) if arguments.machine is None else (arguments.machine,)
    raise SystemExit(0 if run(arguments.steps, start, Console(), names) else 1)


if __name__ == "__main__":
    main()

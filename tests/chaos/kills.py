"""Streams over a ring whose services are killed: python -m tests.chaos.kills --streams 64 --kills 50

Repeats this with pool files, with adapters, and with images on a LLaVA and on a Qwen2.5-VL. Prints one line of totals
for each. Exit status 1: a stream failed or differs from the same stream undisturbed.
"""

import argparse
import tempfile
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from bench.deaths.kills import TOPIC, WHOLE, WITH_ADAPTERS, KillPlan, soak_summary
from bench.harness.topic import progress_lines


def kill_options(module: str, about: str | None, defaults: KillPlan) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tests.chaos.{module}", description=about)
    for name, meaning in (("streams", "at a time"), ("kills", "in total"), ("seed", "of the choice of victims")):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help=meaning)
    parser.add_argument("--seconds", type=float, default=defaults.seconds_between, help="between two kills")
    return parser


def main() -> None:
    arguments = kill_options("kills", __doc__, KillPlan()).parse_args()
    plan = replace(
        WHOLE,
        streams=arguments.streams,
        kills=arguments.kills,
        seconds_between=arguments.seconds,
        seed=arguments.seed,
        adapters=replace(WITH_ADAPTERS, seconds_between=arguments.seconds),
    )
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, progress_lines(console) as progress:
        result = TOPIC.run("kills", plan, Path(folder), progress)
    for part in result.parts:
        for fault in part.faults:
            console.print(fault, markup=False)
        console.print(soak_summary(part), highlight=False, soft_wrap=True)
    raise SystemExit(1 if any(part.failed or part.wrong for part in result.parts) else 0)


if __name__ == "__main__":
    main()

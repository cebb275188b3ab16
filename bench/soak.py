"""python -m bench.soak runs streams continuously, kills a service from time to time, and records the memory.

Writes soak.json and soak.png, and prints a summary; exit status 1 if a stream failed or differs from its undisturbed
run.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench.deaths.kills import SOAK, soak_plan, soak_summary
from bench.harness.origin import origin
from bench.harness.topic import progress_lines
from bench.page import OUT, Measured, load, save, write_page


def main(arguments: list[str]) -> None:
    given = _options(arguments)
    plan = soak_plan(given.minutes, given.every, streams=given.streams, seed=given.seed, threads=given.threads)
    console = Console()
    with progress_lines(console) as progress:
        result = SOAK.run("soak", plan, given.out, progress)
    given.out.mkdir(parents=True, exist_ok=True)
    save(given.out, "soak", Measured(origin(arguments, given.threads, "bench.soak"), result))
    write_page(given.out, load(given.out))
    for fault in result.faults:
        console.print(fault, markup=False)
    console.print(soak_summary(result), highlight=False, soft_wrap=True)
    sys.exit(1 if result.failed or result.wrong else 0)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="total duration")
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between two deaths")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--seed", type=int, default=0, help="seed of the services and times of the deaths")
    parser.add_argument("--threads", type=int, default=2, help="threads of all engines together")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for soak.json, soak.png and README.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

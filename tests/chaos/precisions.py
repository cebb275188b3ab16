"""Streams of a real model in one precision while services are killed: python -m tests.chaos.precisions --precision Q4_1

Prints one line of totals. Exit status 1: a stream failed or differs from the same stream undisturbed.
"""

import tempfile
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from bench.deaths.kills import soak_summary
from bench.deaths.precisions import KILLS, PRECISIONS, TOPIC, PrecisionPlan
from bench.harness.topic import progress_lines
from tests.chaos.kills import kill_options


def main() -> None:
    parser = kill_options("precisions", __doc__, replace(KILLS, kills=50))
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    given = parser.parse_args()
    kills = replace(KILLS, streams=given.streams, kills=given.kills, seed=given.seed, seconds_between=given.seconds)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="precisions-") as folder, progress_lines(console) as progress:
        result = TOPIC.run("precisions", PrecisionPlan(kills, (given.precision,)), Path(folder), progress)
    found = result.precisions[given.precision]
    for line in (*found.faults, soak_summary(found)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(1 if found.failed or found.wrong else 0)


if __name__ == "__main__":
    main()

"""Long shared prompts on engines with pool files and small pools, which evict all the time, while services are killed.

python -m tests.chaos.evictions --kills 500

Prints two lines of totals. Exit status 1: a stream failed or differs from the same stream undisturbed, no block was
adopted or fetched, or something is left in memory.
"""

import tempfile
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from bench.deaths.evicting import PLAN, measure
from bench.deaths.kills import TOPIC, soak_summary
from bench.harness.topic import progress_lines
from tests.chaos.kills import kill_options


def main() -> None:
    given = kill_options("evictions", __doc__, PLAN).parse_args()
    plan = replace(PLAN, streams=given.streams, kills=given.kills, seed=given.seed, seconds_between=given.seconds)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="evictions-") as folder, progress_lines(console) as progress:
        result = TOPIC._replace(measure=measure).run("evictions", plan, Path(folder), progress)
    for line in (*result.faults, soak_summary(result.kills), result.summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(1 if result.faults else 0)


if __name__ == "__main__":
    main()

"""The whole ring in one process and in virtual time: python -m tests.sim.run --seeds 10000

Each seed determines requests and faults. Every client must receive what it would receive undisturbed, and no service
may keep state of ended requests. `--first N --seeds 1` repeats one seed. Exit status 1: something went wrong.
"""

import argparse
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from tests.sim.judge import judge
from tests.sim.scenario import Scenario


class Verdict(NamedTuple):
    """The outcome of one seed."""

    seed: int
    wrong: list[str]
    """Every violation found, as a sentence or a traceback."""
    faults: int
    """Number of injected faults."""
    harmed: int
    """Frames that were lost, delayed or repeated."""
    resumed: int
    """Attempts after the first, of clients and of routers."""
    changed: int
    """Streams that ended because their model is no longer served."""


def verdict_on(seed: int) -> Verdict:
    """Run the scenario of a seed."""
    try:
        wrong, result = judge(Scenario.of(seed))
    except Exception:  # noqa: BLE001 - reported as a violation
        return Verdict(seed, [traceback.format_exc(limit=-6)], 0, 0, 0, 0)
    changed = sum(transcript.model_changed for transcript in result.transcripts)
    return Verdict(seed, wrong, result.faults, result.harmed, result.resumed, changed)


def run_all(seeds: range, processes: int) -> Iterator[Verdict]:
    """Verdicts in any order."""
    if processes == 1:
        yield from map(verdict_on, seeds)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(verdict_on, seeds, chunksize=4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    console, began = Console(), time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    verdicts, bad = [], 0
    for verdict in track(run_all(seeds, arguments.processes), "seeds", total=len(seeds), console=console):
        verdicts.append(verdict)
        if verdict.wrong:
            bad += 1
            console.print(f"seed {verdict.seed}:", *verdict.wrong[:4], sep="\n  ", markup=False)
    faults, harmed, resumed, changed = (
        sum(getattr(verdict, name) for verdict in verdicts) for name in ("faults", "harmed", "resumed", "changed")
    )
    console.print(
        f"{len(verdicts):,} seeds, {bad} wrong; {faults / len(verdicts):.1f} faults each, {harmed:,} frames harmed, "
        f"{resumed:,} attempts after the first, {changed:,} streams ended for another model; "
        f"{time.monotonic() - began:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

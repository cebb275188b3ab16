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

from tests.sim.scenario import Scenario, judge


class Outcome(NamedTuple):
    """What happened with one seed."""

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


def outcome_of(seed: int) -> Outcome:
    """Run the scenario of a seed."""
    try:
        wrong, played = judge(Scenario.of(seed))
    except Exception:  # noqa: BLE001 - reported as a violation
        return Outcome(seed, [traceback.format_exc(limit=-6)], 0, 0, 0, 0)
    changed = sum(story.changed for story in played.stories)
    return Outcome(seed, wrong, played.faults, played.harmed, played.resumed, changed)


def run_all(seeds: range, processes: int) -> Iterator[Outcome]:
    """Outcomes in any order."""
    if processes == 1:
        yield from map(outcome_of, seeds)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(outcome_of, seeds, chunksize=4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    console, began = Console(), time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    outcomes, bad = [], 0
    for outcome in track(run_all(seeds, arguments.processes), "seeds", total=len(seeds), console=console):
        outcomes.append(outcome)
        if outcome.wrong:
            bad += 1
            console.print(f"seed {outcome.seed}:", *outcome.wrong[:4], sep="\n  ", markup=False)
    faults, harmed, resumed, changed = (
        sum(getattr(outcome, name) for outcome in outcomes) for name in ("faults", "harmed", "resumed", "changed")
    )
    console.print(
        f"{len(outcomes):,} seeds, {bad} wrong; {faults / len(outcomes):.1f} faults each, {harmed:,} frames harmed, "
        f"{resumed:,} attempts after the first, {changed:,} streams ended for another model; "
        f"{time.monotonic() - began:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

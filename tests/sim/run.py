"""The whole ring in one process, in time that only jumps: python -m tests.sim.run --seeds 10000

Each seed draws requests and faults; every client must get what it gets undisturbed, and nothing may be left behind.
`--first N --seeds 1` plays one again. Ends with one line; exit status 1 when something went wrong.
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


class Judged(NamedTuple):
    """What became of one seed."""

    seed: int
    wrong: list[str]
    faults: int
    harmed: int
    """Frames."""
    resumed: int
    """Attempts of clients after the first, and of routers."""
    changed: int
    """Streams that ended because their model was not served any more."""


def judged(seed: int) -> Judged:
    """Play it."""
    try:
        wrong, found = judge(Scenario.of(seed))
    except Exception:  # noqa: BLE001 - whatever it is, the seed shows it again
        return Judged(seed, [traceback.format_exc(limit=-6)], 0, 0, 0, 0)
    changed = sum(story.changed for story in found.stories)
    return Judged(seed, wrong, found.faults, found.harmed, found.resumed, changed)


def play(seeds: range, processes: int) -> Iterator[Judged]:
    """In any order."""
    if processes == 1:
        yield from map(judged, seeds)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(judged, seeds, chunksize=4)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    console, began = Console(), time.monotonic()
    seeds = range(given.first, given.first + given.seeds)
    found, bad = [], 0
    for each in track(play(seeds, given.processes), "seeds", total=len(seeds), console=console):
        found.append(each)
        if each.wrong:
            bad += 1
            console.print(f"seed {each.seed}:", *each.wrong[:4], sep="\n  ", markup=False)
    faults, harmed, resumed = (sum(getattr(each, name) for each in found) for name in ("faults", "harmed", "resumed"))
    changed = sum(each.changed for each in found)
    console.print(
        f"{len(found):,} seeds, {bad} wrong; {faults / len(found):.1f} faults each, {harmed:,} frames harmed, "
        f"{resumed:,} attempts begun again, {changed:,} streams ended for another model; "
        f"{time.monotonic() - began:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

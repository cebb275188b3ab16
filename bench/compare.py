"""python -m bench.compare REVISION: compares the engine of this checkout with that of another revision.

Shows whether a change slows down requests that do not use it. Both engines run the same loads in turns, in the
environment of this checkout. Both are started several times, because two processes of the same code differ by a few
percent, which more rounds do not average out; compare with HEAD to see by how much. Smaller differences show without
the model: both engines also run with constant logits instead of the model's computation, which causes most of that
variation.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.harness.children import ROOT, SystemProcess
from bench.harness.load import Load, PlannedRequest, Run
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import rate, ratio
from bench.harness.topic import Step, engine_settings, interleave, progress_lines
from bench.systems.engine_alone import engine_alone
from sluice.host.cores import usable_cores

WIDTHS = (1, 8, 32)
REQUESTS = 3
"""Requests per slot: a load of width w has 3 w requests."""
PROMPT, TOKENS = 128, 64
"""Prompt tokens and output tokens of each request."""
STEPS, STEP_ROUNDS = 256, 12
"""Without the model: output tokens of each request, which is the number of steps of a round; and number of rounds."""
WIDTH = 120
"""Width of the table in characters, if the output is not a terminal."""


class Compared(NamedTuple):
    width: int
    """Requests in flight."""
    speed: float
    """Speed of this checkout divided by that of the other revision: median over the rounds, then over the starts."""
    speed_range: tuple[float, float]
    """First and third quartile over the rounds of one start; combined, the lowest and highest speed of all starts."""
    cpu: float
    """CPU time of this checkout divided by that of the other revision."""
    tokens_per_second: float


class OwnCode(NamedTuple):
    """Microseconds per step without the model's computation: the lowest of the rounds, the median over the starts."""

    here: float
    there: float


def main(arguments: list[str]) -> None:
    given = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    settings = engine_settings(given.threads, backend=given.backend)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        root = stack.enter_context(checkout(given.revision))
        progress = stack.enter_context(progress_lines(console))
        task = progress.add_task("starting", total=None)
        found, own = [], []
        for start in range(1, given.starts + 1):
            # The order of the starts may matter, so it alternates.
            roots = (ROOT, root) if start % 2 else (root, ROOT)
            step = lambda done, start=start: progress.update(task, description=f"start {start}: {done}")  # noqa: E731
            with _started(roots, settings, logs) as engines:
                found.append(compare(engines[ROOT], engines[root], given.rounds, step))
            with _started(roots, settings, logs, without_model=True) as engines:
                own.append(own_code(engines[ROOT], engines[root], step))
    compared = [over_starts(each) for each in zip(*found, strict=True)]
    console.print(_table(given.revision, compared))
    console.print(_own_table(given.revision, compared, [own_over_starts(each) for each in zip(*own, strict=True)]))


@contextmanager
def _started(
    roots: Sequence[Path], settings: dict[str, Any], logs: Path, *, without_model: bool = False
) -> Iterator[dict[Path, SystemProcess]]:
    with ExitStack() as stack:
        engines = {root: engine_alone(TINY, settings, logs, root, without_model=without_model) for root in roots}
        yield {root: stack.enter_context(engine) for root, engine in engines.items()}


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The files of the revision in a temporary folder. Raises CalledProcessError if the revision does not exist."""
    with tempfile.TemporaryDirectory(prefix="revision-") as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def compare(here: SystemProcess, there: SystemProcess, rounds: int, step: Step) -> list[Compared]:
    found = []
    for width in WIDTHS:
        requests = [PlannedRequest(prompt, TOKENS) for prompt in python_prompts(TINY, REQUESTS * width, PROMPT)]
        load = Load(requests, width, salt=f"{width}")
        sides = {f"{name}, {width} at a time": (side, load) for name, side in (("here", here), ("there", there))}
        own, other = interleave(sides, rounds, step)
        ratios = [rate(a) / rate(b) for a, b in zip(own, other, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        speed = statistics.median(map(rate, own))
        found.append(Compared(width, ratio(own, other), (low, high), _cpu(own) / _cpu(other), speed))
    return found


def own_code(here: SystemProcess, there: SystemProcess, step: Step) -> list[OwnCode]:
    """One result per width."""
    found = []
    for width in WIDTHS:
        load = Load(
            [PlannedRequest(prompt, STEPS) for prompt in python_prompts(TINY, width, PROMPT)], width, salt=f"{width}"
        )
        sides = {
            f"{name}, {width} at a time, no model": (side, load) for name, side in (("here", here), ("there", there))
        }
        runs = interleave(sides, STEP_ROUNDS, step)
        found.append(OwnCode(*(1e6 * min(run.seconds for run in side) / STEPS for side in runs)))
    return found


def own_over_starts(found: Sequence[OwnCode]) -> OwnCode:
    return OwnCode(*map(statistics.median, zip(*found, strict=True)))


def over_starts(found: Sequence[Compared]) -> Compared:
    """Combines the results of one width from all starts."""
    speeds = [each.speed for each in found]
    cpu = statistics.median(each.cpu for each in found)
    rates = statistics.median(each.tokens_per_second for each in found)
    return Compared(found[0].width, statistics.median(speeds), (min(speeds), max(speeds)), cpu, rates)


def _cpu(runs: Sequence[Run]) -> float:
    return statistics.median(run.cpu["engine"] for run in runs)


def _table(revision: str, found: Sequence[Compared]) -> Table:
    table = Table("requests in flight", "tokens/s", f"speed / {revision}", "range over the starts", "CPU time ratio")
    for each in found:
        low, high = each.speed_range
        cells = (f"{each.tokens_per_second:,.0f}", f"{each.speed:.3f}×", f"{low:.3f}–{high:.3f}", f"{each.cpu:.3f}×")
        table.add_row(str(each.width), *cells)
    return table


def _own_table(revision: str, compared: Sequence[Compared], own: Sequence[OwnCode]) -> Table:
    table = Table("requests in flight", "a step without the model, µs", revision, "difference, in % of a whole step")
    for each, code in zip(compared, own, strict=True):
        whole = 1e6 * each.width / each.tokens_per_second
        cells = (f"{code.here:.1f}", f"{code.there:.1f}", f"{100 * (code.here - code.there) / whole:+.2f}")
        table.add_row(str(each.width), *cells)
    return table


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("revision", help="commit, tag or branch")
    parser.add_argument("--starts", type=int, default=6, help="number of starts of both engines")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each engine per start, at least 2")
    parser.add_argument("--backend", default="auto", help="backend of both engines")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="threads of each engine; default: all cores"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

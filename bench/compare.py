"""python -m bench.compare REVISION: the engine of this checkout beside that of another revision, under equal loads.

For changes that must not slow down what does not use them. Both run in turns, in the environment of this checkout. Both
are started several times: two processes of the same code differ by some percent, which no number of rounds evens out.
Compare HEAD to see by how much. What differs by less is found without the model: both run with constant logits in place
of its computation, which is what varies so.
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
from bench.harness.load import Ask, Load, Run
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import rate, ratio
from bench.harness.topic import Step, engine_settings, interleave, progress_lines
from bench.systems.engine_alone import engine_alone
from sluice.ring.cores import usable_cores

WIDTHS = (1, 8, 32)
REQUESTS = 3
"""Per place at a time."""
PROMPT, TOKENS = 128, 64
STEPS, STEP_ROUNDS = 256, 12
"""Without the model: tokens of each request, of which as many as are at a time."""
WIDTH = 120
"""Of the table, in characters, where no terminal says."""


class Compared(NamedTuple):
    width: int
    speed: float
    """Of this checkout by the other's: the median over the rounds, then over the starts."""
    speed_range: tuple[float, float]
    """The middle half of the rounds; then the least and the most of the starts."""
    cpu: float
    """CPU time of this checkout by the other's."""
    tokens_per_second: float


class OwnCode(NamedTuple):
    """Microseconds per step beside the model's computation: the least of the rounds, the median over the starts."""

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
            # Which one is first may matter.
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
    """Its files, in a folder of their own. Raises CalledProcessError for one that git does not know."""
    with tempfile.TemporaryDirectory(prefix="revision-") as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def compare(here: SystemProcess, there: SystemProcess, rounds: int, step: Step) -> list[Compared]:
    found = []
    for width in WIDTHS:
        asks = [Ask(prompt, TOKENS) for prompt in python_prompts(TINY, REQUESTS * width, PROMPT)]
        load = Load(asks, width, salt=f"{width}")
        sides = {f"{name}, {width} at a time": (side, load) for name, side in (("here", here), ("there", there))}
        own, other = interleave(sides, rounds, step)
        ratios = [rate(a) / rate(b) for a, b in zip(own, other, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        speed = statistics.median(map(rate, own))
        found.append(Compared(width, ratio(own, other), (low, high), _cpu(own) / _cpu(other), speed))
    return found


def own_code(here: SystemProcess, there: SystemProcess, step: Step) -> list[OwnCode]:
    """Of each width."""
    found = []
    for width in WIDTHS:
        load = Load([Ask(prompt, STEPS) for prompt in python_prompts(TINY, width, PROMPT)], width, salt=f"{width}")
        sides = {
            f"{name}, {width} at a time, no model": (side, load) for name, side in (("here", here), ("there", there))
        }
        runs = interleave(sides, STEP_ROUNDS, step)
        found.append(OwnCode(*(1e6 * min(run.seconds for run in side) / STEPS for side in runs)))
    return found


def own_over_starts(found: Sequence[OwnCode]) -> OwnCode:
    return OwnCode(*map(statistics.median, zip(*found, strict=True)))


def over_starts(found: Sequence[Compared]) -> Compared:
    """Of one width, one from each start."""
    speeds = [each.speed for each in found]
    cpu = statistics.median(each.cpu for each in found)
    rates = statistics.median(each.tokens_per_second for each in found)
    return Compared(found[0].width, statistics.median(speeds), (min(speeds), max(speeds)), cpu, rates)


def _cpu(runs: Sequence[Run]) -> float:
    return statistics.median(run.cpu["engine"] for run in runs)


def _table(revision: str, found: Sequence[Compared]) -> Table:
    table = Table("at a time", "tokens/s", f"speed by that of {revision}", "least and most of the starts", "CPU time")
    for each in found:
        low, high = each.speed_range
        cells = (f"{each.tokens_per_second:,.0f}", f"{each.speed:.3f}×", f"{low:.3f}–{high:.3f}", f"{each.cpu:.3f}×")
        table.add_row(str(each.width), *cells)
    return table


def _own_table(revision: str, compared: Sequence[Compared], own: Sequence[OwnCode]) -> Table:
    table = Table("at a time", "a step without the model, µs", f"of {revision}", "difference, in % of a whole step")
    for each, code in zip(compared, own, strict=True):
        whole = 1e6 * each.width / each.tokens_per_second
        cells = (f"{code.here:.1f}", f"{code.there:.1f}", f"{100 * (code.here - code.there) / whole:+.2f}")
        table.add_row(str(each.width), *cells)
    return table


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("revision", help="commit, tag or branch")
    parser.add_argument("--starts", type=int, default=6, help="of both engines")
    parser.add_argument("--rounds", type=int, default=3, help="of each engine, at least 2")
    parser.add_argument("--backend", default="auto", help="what computes the model")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each engine; default: all cores")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

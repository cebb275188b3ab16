"""Streams on machines with keepers as a table, and the page docs/measurements/keepers.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness.origin import origin
from bench.harness.tables import Table, markdown, numbers, plural, table
from sluice.loadgen.report import percentile

PAGE = Path(__file__).parents[3] / "docs" / "measurements" / "keepers.md"
HEAD = """\
# Machines with keepers

The ring has a router, a detokenizer and three engines, each in a network namespace, which acts as a machine with its
own address; a [keeper](../kv_cache.md#on-other-machines-the-keeper) runs beside each engine. A stream is disturbed
after its first output, or while its prompt is computed, and compared with the undisturbed one: text, token ids,
logprobs. The namespaces share the cores of one machine.

*Pause*: the longest time between two deltas from the disturbance on, or until the first. *Computed again*: context
tokens that the other engines computed from then on, at most, and in brackets the most that they should; for a stream
that is only handed over, those of the engine that decodes. Cells with two numbers are p50 · p99.
"""


class Seen(NamedTuple):
    """A stream over one case. Times in seconds."""

    case: str
    first_token: float
    pause: float
    computed: int
    """Context tokens that engines computed from the disturbance on; of `divided`, those of the engine that decodes."""
    expected: int
    """The most that they should."""
    fetched: int
    """Blocks."""
    difference: str
    same_bits: bool

    @property
    def good(self) -> bool:
        return not self.difference and self.computed <= self.expected

    @property
    def text(self) -> str:
        return (
            f"{self.case}: first token {self.first_token:.2f} s, pause {self.pause:.2f} s, {self.computed:,} tokens "
            f"computed again (at most {self.expected:,}), {self.fetched:,} blocks copied, "
            f"{self.difference or 'the same text'}, bits {'equal' if self.same_bits else 'differ'}"
        )


def summary(title: str, runs: Sequence[Seen]) -> Table:
    """The streams of one precision and length by case, which `title` names."""
    columns = "streams | pause, s | first token, s | computed again | blocks copied, at least | that differ | in bits"
    by_case = {each.case: [seen for seen in runs if seen.case == each.case] for each in runs}
    return table(f"{title} | {columns}", (f"{case} | {_cells(each)}" for case, each in by_case.items()))


def _cells(runs: Sequence[Seen]) -> str:
    pause, first = (_percentiles([getattr(seen, name) for seen in runs]) for name in ("pause", "first_token"))
    computed = f"{max(seen.computed for seen in runs):,} ({max(seen.expected for seen in runs):,})"
    different = f"{sum(bool(seen.difference) for seen in runs)} | {sum(not seen.same_bits for seen in runs)}"
    return f"{len(runs)} | {pause} | {first} | {computed} | {min(seen.fetched for seen in runs):,} | {different}"


def _percentiles(seconds: Sequence[float]) -> str:
    return numbers(*(percentile(seconds, percent) for percent in (50, 99)))


def write_page(found: Mapping[str, Sequence[Seen]], arguments: list[str]) -> None:
    PAGE.write_text(page(found, arguments), encoding="utf-8")


def page(found: Mapping[str, Sequence[Seen]], arguments: list[str]) -> str:
    made = origin(arguments, threads=1, module="tests.system.hosts.kept")
    tables = [f"{markdown(summary(title, runs))}\n" for title, runs in found.items()]
    streams = [seen for runs in found.values() for seen in runs]
    bad = sum(not seen.good for seen in streams)
    verdict = f"{plural(len(streams), 'stream')}, of which {bad} failed, differed or computed more than they should."
    source = f"`{made.command}`, {made.date}, {made.machine}; {made.software}."
    return "\n".join([HEAD, *tables, verdict, "", source, ""])

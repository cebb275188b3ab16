"""Performance goals of the GPU engine, as far as a run can judge them."""

from collections.abc import Iterator
from typing import NamedTuple

from bench.gpu.findings import Decode, Findings
from bench.gpu.measures import AS_SERVED, EAGER, SLUICE
from bench.gpu.shapes import LARGE, SMALL

COPY_SHARE = 0.8
GRAPHS_FACTOR = 1.5
HIDDEN_SHARE = 0.8


class Goal(NamedTuple):
    name: str
    wanted: str
    found: str
    met: bool


def goals(found: Findings) -> list[Goal]:
    """Goals whose both sides were measured."""
    return [*_bandwidth(found), *_peers(found), *_graphs(found), *_overlap(found)]


def _bandwidth(found: Findings) -> Iterator[Goal]:
    one = _alone(found, LARGE.name, AS_SERVED)
    if one is not None and found.rates is not None:
        share = one.bytes_per_second / found.rates.copy_bytes_per_second
        name = f"{LARGE.name}, batch 1: of the copy's bandwidth"
        yield Goal(name, f"{COPY_SHARE:.0%}", f"{share:.0%}", share >= COPY_SHARE)


def _peers(found: Findings) -> Iterator[Goal]:
    rates = {
        one.system: one.tokens_per_second for one in found.throughput if (one.shape, one.batch) == (LARGE.name, 64)
    }
    ours = rates.pop(SLUICE, None)
    if ours is not None and rates:
        best = max(rates, key=lambda system: rates[system])
        share = ours / rates[best]
        yield Goal(f"{LARGE.name}, batch 64: of the best peer, {best}", "1.00", f"{share:.2f}", share >= 1)


def _graphs(found: Findings) -> Iterator[Goal]:
    graphs, eager = (_alone(found, SMALL.name, mode) for mode in (AS_SERVED, EAGER))
    if graphs is not None and eager is not None:
        factor = eager.step_seconds / graphs.step_seconds
        yield Goal(
            f"{SMALL.name}, batch 1: of eager steps", f"{GRAPHS_FACTOR:.1f}", f"{factor:.2f}", factor >= GRAPHS_FACTOR
        )


def _overlap(found: Findings) -> Iterator[Goal]:
    steps = [one for one in found.gaps if (one.shape, one.mode) == (SMALL.name, AS_SERVED)]
    idle = {(one.batch, one.overlap): one.idle_seconds for one in steps}
    for batch in sorted({batch for batch, _ in idle}):
        plain, ahead = idle.get((batch, False)), idle.get((batch, True))
        if plain and ahead is not None:
            hidden = 1 - ahead / plain
            name = f"{SMALL.name}, batch {batch}: of the idle time, hidden by overlap"
            yield Goal(name, f"{HIDDEN_SHARE:.0%}", f"{hidden:.0%}", hidden >= HIDDEN_SHARE)


def _alone(found: Findings, shape: str, mode: str) -> Decode | None:
    return next((one for one in found.decode if (one.shape, one.mode, one.batch) == (shape, mode, 1)), None)

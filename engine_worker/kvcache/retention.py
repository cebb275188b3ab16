"""How eagerly a block is kept once nobody holds it: a priority that changes at given times."""

from bisect import bisect_right
from collections.abc import Iterable
from math import inf
from operator import attrgetter
from typing import NamedTuple

from sluice.ring.params import DEFAULT_RETENTION, RangeRetention, RetentionParams


class Phase(NamedTuple):
    """A priority, 0 (evicted first) to 100 (evicted last), that holds until then on the engine's clock."""

    until: float
    priority: int


Retention = tuple[Phase, ...]
"""One phase after the other; the last one has no end."""

STANDARD: Retention = (Phase(inf, DEFAULT_RETENTION),)


def named(params: RetentionParams, position: int, num_prompt: int, now: float) -> Retention | None:
    """What a request says about the block that begins at this position; None where it says nothing.

    The range that a block's first token lies in counts, as in TensorRT-LLM; generated blocks have the decode priority.
    """
    if position >= num_prompt:
        if params.decode_priority == DEFAULT_RETENTION:
            return None
        return _from(now, params.decode_priority, params.decode_seconds)
    part = _range_at(params.prompt, position)
    return None if part is None else _from(now, part.priority, part.seconds)


def highest(a: Retention, b: Retention) -> Retention:
    """At every time the higher priority of the two."""
    if a == b:
        return a
    phases: list[Phase] = []
    for until in sorted({phase.until for phase in (*a, *b)}):
        priority = max(_priority(a, until), _priority(b, until))
        if phases and phases[-1].priority == priority:
            phases.pop()
        phases.append(Phase(until, priority))
    return tuple(phases)


def at(retention: Retention, now: float) -> Retention:
    """Without the phases that are over."""
    while retention[0].until <= now:
        retention = retention[1:]
    return retention


def _from(now: float, priority: int, seconds: float | None) -> Retention:
    if seconds is None:
        return (Phase(inf, priority),)
    return (Phase(now + seconds, priority), *STANDARD)


def _priority(retention: Iterable[Phase], until: float) -> int:
    """Of the phase that holds just before then."""
    return next(phase.priority for phase in retention if phase.until >= until)


def _range_at(ranges: tuple[RangeRetention, ...], position: int) -> RangeRetention | None:
    index = bisect_right(ranges, position, key=attrgetter("start")) - 1
    return ranges[index] if index >= 0 and position < ranges[index].end else None

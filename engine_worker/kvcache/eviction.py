"""The eviction order of cached blocks: by priority, which may change at given times, then least recently used."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import attrgetter
from typing import NamedTuple

from sluice.wire.params import DEFAULT_RETENTION, RetentionParams

HIGHEST_PRIORITY = 100
COMPACT_AT = 64
"""Stale heap entries, in addition to one per block, at which they are removed."""


class Phase(NamedTuple):
    """A priority, from 0 (evicted first) to 100 (evicted last), and the time on the engine's clock until it holds."""

    until: float
    priority: int


Retention = tuple[Phase, ...]
"""How long a block should stay cached: consecutive phases, of which the last one never ends."""

DEFAULT: Retention = (Phase(inf, DEFAULT_RETENTION),)


def requested(params: RetentionParams, position: int, num_prompt: int, now: float) -> Retention | None:
    """The retention that a request specifies for the block that begins at `position`; None if it does not."""
    if position >= num_prompt:
        if params.decode_priority == DEFAULT_RETENTION:
            return None
        return _from(now, params.decode_priority, params.decode_seconds)
    # As in TensorRT-LLM, the range that contains the block's first token applies.
    index = bisect_right(params.prompt, position, key=attrgetter("start")) - 1
    if index < 0 or position >= params.prompt[index].end:
        return None
    return _from(now, params.prompt[index].priority, params.prompt[index].seconds)


def higher(a: Retention, b: Retention) -> Retention:
    """The retention that at any time has the higher of the two priorities."""
    if a == b:
        return a
    phases: list[Phase] = []
    for until in sorted({phase.until for phase in (*a, *b)}):
        priority = max(_priority(a, until), _priority(b, until))
        if phases and phases[-1].priority == priority:
            phases.pop()
        phases.append(Phase(until, priority))
    return tuple(phases)


def remaining_phases(retention: Retention, now: float) -> Retention:
    """The phases that have not ended."""
    while retention[0].until <= now:
        retention = retention[1:]
    return retention


def _from(now: float, priority: int, seconds: float | None) -> Retention:
    if seconds is None:
        return (Phase(inf, priority),)
    return (Phase(now + seconds, priority), *DEFAULT)


def _priority(retention: Iterable[Phase], until: float) -> int:
    """Priority of the phase that holds just before `until`."""
    return next(phase.priority for phase in retention if phase.until >= until)


def _ignore(block: int, retention: Retention) -> None:
    pass


class EvictionOrder:
    """The evictable blocks: lowest priority first and, among equal priorities, the least recently used first.

    Ends of phases take effect when a block is next evicted or looked for: the block then becomes the most recently used
    of its new priority.
    """

    def __init__(self, clock: Callable[[], float], on_phase_end: Callable[[int, Retention], None] = _ignore) -> None:
        """`on_phase_end`: called with a block and its remaining retention."""
        self._clock = clock
        self._on_phase_end = on_phase_end
        self._retentions: dict[int, Retention] = {}
        self._levels: dict[int, OrderedDict[int, None]] = {}
        """Blocks by priority, the least recently used first."""
        self._endings: list[tuple[float, int, int]] = []
        """Heap of (end of a phase, number, block). An entry is stale if the block was removed or its retention has
        changed."""
        self._numbers = count()
        """Break ties between equal ends, in the order of `add`."""

    def __len__(self) -> int:
        return len(self._retentions)

    def __iter__(self) -> Iterator[int]:
        return iter(self._retentions)

    def add(self, block: int, retention: Retention) -> None:
        """Add a block as the most recently used one of its priority."""
        self._retentions[block] = retention
        until, priority = retention[0]
        self._levels.setdefault(priority, OrderedDict())[block] = None
        if until < inf:
            heappush(self._endings, (until, next(self._numbers), block))
            if len(self._endings) > 2 * len(self._retentions) + COMPACT_AT:
                self._compact()

    def remove(self, block: int) -> None:
        priority = self._retentions.pop(block)[0].priority
        level = self._levels[priority]
        del level[block]
        if not level:
            del self._levels[priority]

    def pop(self) -> int:
        """Remove and return the block to evict first. Raises IndexError if no block can be evicted."""
        if not self._retentions:
            raise IndexError("nothing to evict")
        block = next(iter(self._levels[self.lowest()]))
        self.remove(block)
        return block

    def lowest(self) -> int:
        """Priority of the block to evict first; there must be one."""
        if self._endings:
            self._refresh(self._clock())
        # There are few distinct priorities, 101 at most.
        return min(self._levels)

    def clear(self) -> list[int]:
        """Remove and return all blocks, in any order."""
        blocks = list(self._retentions)
        self._retentions.clear()
        self._levels.clear()
        self._endings.clear()
        return blocks

    def _refresh(self, now: float) -> None:
        """Apply the ends of phases up to `now`."""
        while self._endings and self._endings[0][0] <= now:
            until, _, block = heappop(self._endings)
            retention = self._retentions.get(block)
            if retention is not None and retention[0].until == until:
                remaining = remaining_phases(retention, now)
                self.remove(block)
                self.add(block, remaining)
                self._on_phase_end(block, remaining)

    def _compact(self) -> None:
        """Drop the stale entries of the heap."""
        first = ((retention[0].until, block) for block, retention in self._retentions.items())
        self._endings = [(until, next(self._numbers), block) for until, block in first if until < inf]
        heapify(self._endings)

"""Which cached block goes first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from engine_worker.kvcache.retention import Retention, at

COMPACT_AT = 64
"""Endings that nobody waits for any more, beyond as many as there are blocks, before they are swept out."""


class EvictionOrder:
    """Blocks that may be evicted: the lowest priority first, among equals the least recently used.

    A priority that ends is looked at only when a block is asked for; the block then joins its new equals as the most
    recently used.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retentions: dict[int, Retention] = {}
        self._levels: dict[int, OrderedDict[int, None]] = {}
        self._endings: list[tuple[float, int, int]] = []
        """Heap of (end of a phase, number, block). One whose block has gone or has another retention means nothing."""
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._retentions)

    def __iter__(self) -> Iterator[int]:
        return iter(self._retentions)

    def add(self, block: int, retention: Retention) -> None:
        """It was used until now."""
        self._retentions[block] = retention
        until, priority = retention[0]
        self._levels.setdefault(priority, OrderedDict())[block] = None
        if until < inf:
            self._numbers += 1
            heappush(self._endings, (until, self._numbers, block))
            if len(self._endings) > 2 * len(self._retentions) + COMPACT_AT:
                self._compact()

    def remove(self, block: int) -> None:
        """It is used again, or has nothing to keep."""
        priority = self._retentions.pop(block)[0].priority
        level = self._levels[priority]
        del level[block]
        if not level:
            del self._levels[priority]

    def pop(self) -> int:
        """The one to go first. Raises IndexError when there is none."""
        if not self._retentions:
            raise IndexError("nothing to evict")
        block = next(iter(self._levels[self.lowest()]))
        self.remove(block)
        return block

    def lowest(self) -> int:
        """Priority of the one to go first; there must be one."""
        if self._endings:
            self._refresh(self._clock())
        return min(self._levels)

    def clear(self) -> list[int]:
        """Take all out, in no order."""
        blocks = list(self._retentions)
        self._retentions.clear()
        self._levels.clear()
        self._endings.clear()
        return blocks

    def _refresh(self, now: float) -> None:
        while self._endings and self._endings[0][0] <= now:
            until, _, block = heappop(self._endings)
            retention = self._retentions.get(block)
            if retention is not None and retention[0].until == until:
                self.remove(block)
                self.add(block, at(retention, now))

    def _compact(self) -> None:
        """Only the endings that are waited for, in the order in which the blocks were added."""
        endings = ((block, retention[0].until) for block, retention in self._retentions.items())
        ending = enumerate((block, until) for block, until in endings if until < inf)
        self._endings = [(until, number, block) for number, (block, until) in ending]
        self._numbers = len(self._endings)
        heapify(self._endings)

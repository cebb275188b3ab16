"""Who may hold memory: the first question of scheduling."""

from collections import abc
from operator import attrgetter
from typing import Protocol

from engine_worker.kvcache.cache import KvCache
from engine_worker.request import Sequence

IN_ORDER = attrgetter("order")
HOLDS = attrgetter("blocks")


class CapacityScheduler(Protocol):
    """Decides and moves nothing: the blocks are given and taken by whoever asked."""

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, paused): who shall hold blocks for all its tokens now, in order, and who shall give them back.

        `active` has every sequence that lives and does not await its prompt, in order. Those in neither list wait, or
        keep what they hold without running.
        """
        ...


class Holders:
    """Who holds memory, in order; sorted anew only when it is somebody else than the last time."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._sorted: list[Sequence] = []

    def in_order(self) -> list[Sequence]:
        """A new list."""
        holders = self._cache.holders
        # As many as then, and each of those still holds blocks: the same.
        if len(holders) != len(self._sorted) or not all(map(HOLDS, self._sorted)):
            self._sorted = sorted(holders, key=IN_ORDER)
        return self._sorted.copy()

"""Which sequences may hold memory: the first question of scheduling."""

from collections import abc
from typing import Protocol

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import IN_ORDER, Sequence

STEPS_BETWEEN_TRIES = 8


class CapacityScheduler(Protocol):
    """Only decides: the caller moves the blocks."""

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, paused): which sequences, in order, shall hold blocks for all their tokens, and which shall release
        theirs.

        `active` has every live sequence that does not await its prompt, in order. Those in neither list wait, or keep
        their blocks without running.
        """
        ...


class Holders:
    """The holders of memory in order; and whether the first waiting sequence is known not to fit beside them.

    Both are found out again only when the holders have changed. As long as they stay the same a blocked sequence seldom
    begins to fit (a prefix of it was cached, a window moved on), so one try in STEPS_BETWEEN_TRIES steps is enough.
    """

    def __init__(self, cache: KvCacheManager) -> None:
        self._cache = cache
        self._sorted: list[Sequence] = []
        self._blocked: Sequence | None = None
        self._steps_left = 0

    def in_order(self) -> list[Sequence]:
        """A new list."""
        holders = self._cache.holders
        # Same size and every previous holder still is one: the same set.
        if len(holders) != len(self._sorted) or not all(map(holders.__contains__, self._sorted)):
            self._sorted = sorted(holders, key=IN_ORDER)
            self._blocked = None
        return self._sorted.copy()

    def record_blocked(self, sequence: Sequence) -> None:
        """The first waiting sequence does not fit beside the holders of the last `in_order`."""
        # Not while an in-flight step is about to give blocks back: then it may fit in the next step.
        if not self._cache.retired:
            self._blocked, self._steps_left = sequence, STEPS_BETWEEN_TRIES

    def is_head_blocked(self, active: abc.Sequence[Sequence]) -> bool:
        """Whether to skip the try in this step. Some of `active` must be waiting."""
        if self._blocked is None or self._steps_left < 1:
            return False
        self._steps_left -= 1
        return self._blocked is next(sequence for sequence in active if not sequence.blocks)

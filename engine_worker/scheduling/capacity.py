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
    """The holders of memory in order; sorted again only when they have changed."""

    def __init__(self, cache: KvCacheManager) -> None:
        self.changes = 0
        """How often they have changed."""
        self._cache = cache
        self._sorted: list[Sequence] = []

    def in_order(self) -> list[Sequence]:
        """A new list."""
        holders = self._cache.holders
        # Same size and every previous holder still is one: the same set.
        if len(holders) != len(self._sorted) or not all(map(holders.__contains__, self._sorted)):
            self._sorted = sorted(holders, key=IN_ORDER)
            self.changes += 1
        return self._sorted.copy()


class BlockedHead:
    """Remembers that the first waiting sequence did not fit, so that it is not tried again in every step.

    As long as the holders stay the same it seldom begins to fit (a prefix of it was cached, a window moved on), so one
    try in STEPS_BETWEEN_TRIES steps is enough.
    """

    def __init__(self, cache: KvCacheManager) -> None:
        self._cache = cache
        self._sequence: Sequence | None = None
        self._changes = 0
        self._steps_left = 0

    def record(self, sequence: Sequence, changes: int) -> None:
        """The first waiting sequence did not fit; `changes`: of the holders, so far."""
        # Not while an in-flight step is about to give blocks back: then it may fit in the next step.
        if not self._cache.retired:
            self._sequence, self._changes, self._steps_left = sequence, changes, STEPS_BETWEEN_TRIES

    def is_blocked(self, active: abc.Sequence[Sequence], changes: int) -> bool:
        """Whether to skip the try in this step. Some of `active` must be waiting."""
        if self._sequence is None or changes != self._changes or self._steps_left < 1:
            return False
        self._steps_left -= 1
        return self._sequence is next(sequence for sequence in active if not sequence.blocks)

"""Who may hold memory: the first question of scheduling."""

from collections import abc
from typing import Protocol

from engine_worker.kvcache.cache import KvCache
from engine_worker.request import IN_ORDER, Sequence

STEPS_OF_PATIENCE = 8


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
        self.changes = 0
        """How often it was somebody else."""
        self._cache = cache
        self._sorted: list[Sequence] = []

    def in_order(self) -> list[Sequence]:
        """A new list."""
        holders = self._cache.holders
        # As many as then, and each of those still holds blocks: the same.
        if len(holders) != len(self._sorted) or not all(map(holders.__contains__, self._sorted)):
            self._sorted = sorted(holders, key=IN_ORDER)
            self.changes += 1
        return self._sorted.copy()


class BlockedHead:
    """That the first in line did not fit, which is not found out anew in every step.

    While the same hold memory it seldom begins to fit (a prefix of it was cached, a window moved on), so it is enough
    to look every STEPS_OF_PATIENCE steps.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._sequence: Sequence | None = None
        self._changes = 0
        self._patience = 0

    def note(self, sequence: Sequence, changes: int) -> None:
        """The first in line did not fit, after so many changes of the holders."""
        # Where a step in flight is about to give blocks back it may fit in the next step.
        if not self._cache.retired:
            self._sequence, self._changes, self._patience = sequence, changes, STEPS_OF_PATIENCE

    def stands(self, active: abc.Sequence[Sequence], changes: int) -> bool:
        """Whether it is to be taken for granted in this step. Some of the active wait, and some hold memory."""
        if self._sequence is None or changes != self._changes or self._patience < 1:
            return False
        self._patience -= 1
        return self._sequence is next(sequence for sequence in active if not sequence.blocks)

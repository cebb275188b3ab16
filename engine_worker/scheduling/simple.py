"""The two questions asked one after the other, and their answers carried out."""

from collections import abc
from typing import NamedTuple

from engine_worker.kvcache.cache import KvCache
from engine_worker.request import Sequence, State
from engine_worker.scheduling.capacity import CapacityScheduler
from engine_worker.scheduling.micro_batch import Chunk, MicroBatchScheduler


class Schedule(NamedTuple):
    """What a step computes; every sequence in it holds the blocks for that."""

    context: list[Chunk]
    generation: list[Sequence]


class SimpleScheduler:
    """Asks for capacity, moves the blocks accordingly, then asks who runs.

    Whatever the capacity scheduler promised, only sequences that got their blocks run: one that promises too much
    delays and corrupts nothing.
    """

    def __init__(self, cache: KvCache, capacity: CapacityScheduler, micro_batch: MicroBatchScheduler) -> None:
        self._cache = cache
        self._capacity = capacity
        self._micro_batch = micro_batch

    def schedule(self, active: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = frozenset()) -> Schedule:
        """The next step of `active`, which is in order."""
        fitting, paused = self._capacity.schedule_request(active)
        for sequence in paused:
            self._cache.release(sequence)
            sequence.state = State.PAUSED
        ready = self._cache.allocate(fitting)
        for sequence in ready:
            sequence.state = State.RUNNING
        return Schedule(*self._micro_batch.schedule(ready, inflight_request_ids))

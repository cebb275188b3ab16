"""The two questions asked one after the other, and their answers carried out."""

from abc import ABC, abstractmethod
from collections import abc
from typing import NamedTuple

from engine_worker.request import Sequence, State
from engine_worker.scheduling.capacity import CapacityScheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching, MicroBatchScheduler
from engine_worker.scheduling.warnings import SchedulerWarnings

NO_BATCH = (0, 0)
"""`static_batch` of policies that have none."""


class InFlightError(Exception):
    """A sequence that is to be paused is in a step in flight: its blocks can go back when that is collected.

    Whoever asked for the schedule collects the step, then asks again.
    """


class Schedule(NamedTuple):
    """What a step computes; every sequence in it holds the blocks for that."""

    context: list[Chunk]
    generation: list[Sequence]


class RequestScheduler(ABC):
    """Base of schedulers in one piece. Blocks move through `hold` and `pause` only, which keep the books in order."""

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    @property
    def static_batch(self) -> tuple[int, int]:
        """(tokens generated since the static batch began, slots of its ended sequences); zeros under other policies."""
        return NO_BATCH

    @abstractmethod
    def schedule(self, active: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = frozenset()) -> Schedule:
        """The next step of `active`, which is in order; nothing that is in flight."""

    def hold(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Give these blocks for all their tokens, each in turn and all or nothing; returns those that have them.

        Of what a newcomer has pending, only what the cache does not hold is left after this.
        """
        awaiting, ended = State.AWAITING, State.ENDED
        return self._hold([s for s in dict.fromkeys(sequences) if s.state is not ended and s.state is not awaiting])

    def pause(self, sequences: abc.Iterable[Sequence]) -> None:
        """Take the blocks of these back. They can hold blocks again later, and compute their tokens again.

        Raises InFlightError, and does nothing, where one of them is in flight.
        """
        sequences = [sequence for sequence in sequences if sequence.blocks]
        if any(sequence.num_inflight for sequence in sequences):
            raise InFlightError
        for sequence in sequences:
            self.context.cache.release(sequence)
            self.context.pauses.add(sequence)

    def _idles(self, schedule: Schedule, inflight_request_ids: abc.Set[int]) -> bool:
        """Nobody runs, and no step in flight is about to change that or to give blocks back."""
        if schedule.context or schedule.generation or inflight_request_ids or self.context.cache.retired:
            return False
        return not any(holder.num_inflight for holder in self.context.cache.holders)

    def _hold(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """The same of active ones, each there once."""
        held, running = self.context.cache.allocate(sequences), State.RUNNING
        for sequence in held:
            sequence.state = running
        return held


class SimpleScheduler(RequestScheduler):
    """Asks for capacity, moves the blocks accordingly, then asks who runs.

    Whatever the capacity scheduler promised, only sequences that got their blocks run. Where nobody does, though
    somebody is there to, as when all who hold memory wait for more of it, the step is planned with MaxUtilization and
    InFlightBatching instead: the first in order can always get on with these.
    """

    def __init__(
        self,
        context: SchedulerContext,
        capacity: CapacityScheduler,
        micro_batch: MicroBatchScheduler,
        complaints: SchedulerWarnings,
    ) -> None:
        super().__init__(context)
        self._capacity = capacity
        self._micro_batch = micro_batch
        self._sound = (MaxUtilization(context), InFlightBatching(context))
        self._complaints = complaints

    @property
    def static_batch(self) -> tuple[int, int]:
        """See RequestScheduler."""
        found: tuple[int, int] = getattr(self._capacity, "static_batch", NO_BATCH)
        return found

    def schedule(self, active: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = frozenset()) -> Schedule:
        """See RequestScheduler. Raises InFlightError before anything is moved."""
        if not active:
            return Schedule([], [])
        schedule = self._ask(self._capacity, self._micro_batch, active, inflight_request_ids)
        if not self._idles(schedule, inflight_request_ids):
            return schedule
        self._complaints.nobody(len(active), len(self.context.cache.holders))
        return self._ask(*self._sound, active, inflight_request_ids)

    def _ask(
        self,
        capacity: CapacityScheduler,
        micro_batch: MicroBatchScheduler,
        active: abc.Sequence[Sequence],
        inflight_request_ids: abc.Set[int],
    ) -> Schedule:
        fitting, paused = capacity.schedule_request(active)
        self.pause(paused)
        # Whose last token is being drawn takes no place in the batch.
        ready = [sequence for sequence in self._hold(fitting) if sequence.due]
        return Schedule(*micro_batch.schedule(ready, inflight_request_ids))

"""Asks the two questions one after the other and carries out the answers."""

from abc import ABC, abstractmethod
from collections import abc
from typing import NamedTuple, Protocol

from engine_worker.scheduling.context import SchedulerContext, SchedulerWarnings
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching, MicroBatchScheduler
from engine_worker.sequence import Sequence, State

NO_BATCH = (0, 0)
"""`static_batch` of policies without one."""
NO_REQUESTS: frozenset[int] = frozenset()


class InFlightError(Exception):
    """A sequence to be preempted is in flight: collect that step, which uses its blocks, and schedule again."""


class Schedule(NamedTuple):
    """What a step computes; every sequence in it holds the blocks it needs."""

    context: list[Chunk]
    generation: list[Sequence]


class CapacityScheduler(Protocol):
    """Only decides: the caller moves the blocks."""

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, paused): those to hold blocks for all their tokens, in order, and those to release theirs.

        `active` has every live sequence that does not await its prompt, in order. Those in neither list wait, or keep
        their blocks without running.
        """


class RequestScheduler(ABC):
    """Base of schedulers that answer both questions. Blocks are moved only by `hold` and `pause`."""

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    @property
    def static_batch(self) -> tuple[int, int]:
        """(tokens generated since the static batch began, slots of its ended sequences); zeros under other policies."""
        return NO_BATCH

    @abstractmethod
    def schedule(self, active: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = NO_REQUESTS) -> Schedule:
        """The next step. `active` is in order; `inflight_request_ids`: see MicroBatchScheduler."""

    def hold(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Allocate blocks for all tokens of each, in turn, all or nothing; returns those that have them.

        `num_pending` of a newcomer then no longer includes what the prefix cache holds.
        """
        awaiting, ended = State.AWAITING, State.ENDED
        return self._hold([s for s in dict.fromkeys(sequences) if s.state is not ended and s.state is not awaiting])

    def pause(self, sequences: abc.Iterable[Sequence]) -> None:
        """Preempt: release the blocks of these. Raises InFlightError, with no effect, if one of them is in flight."""
        sequences = [sequence for sequence in sequences if sequence.blocks]
        # Checked for all first, so that nothing has moved when it raises.
        if any(sequence.num_inflight for sequence in sequences):
            raise InFlightError
        for sequence in sequences:
            self.context.cache.preempt(sequence)
            sequence.state = State.PREEMPTED
            sequence.request.preemptions += 1

    def _idles(self, schedule: Schedule) -> bool:
        """Whether nothing runs, and no in-flight step will change that or give blocks back."""
        if schedule.context or schedule.generation or self.context.cache.retired:
            return False
        return not any(holder.num_inflight for holder in self.context.cache.holders)

    def _hold(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """As `hold`, for distinct active sequences."""
        held, running = self.context.cache.allocate(sequences), State.RUNNING
        for sequence in held:
            sequence.state = running
        return held


class SimpleScheduler(RequestScheduler):
    """Asks the capacity scheduler, moves the blocks accordingly, then asks the micro-batch scheduler.

    Only sequences that got their blocks run, whatever the capacity scheduler said. If nothing would run although
    sequences are active, for example because all holders wait for more memory, the step is planned with MaxUtilization
    and InFlightBatching instead: with these the first in order can always run.
    """

    def __init__(
        self,
        context: SchedulerContext,
        capacity: CapacityScheduler,
        micro_batch: MicroBatchScheduler,
        warnings: SchedulerWarnings,
    ) -> None:
        super().__init__(context)
        self._capacity = capacity
        self._micro_batch = micro_batch
        self._fallback = (MaxUtilization(context), InFlightBatching(context))
        self._warnings = warnings

    @property
    def static_batch(self) -> tuple[int, int]:
        found: tuple[int, int] = getattr(self._capacity, "static_batch", NO_BATCH)
        return found

    def schedule(self, active: abc.Sequence[Sequence], _inflight_request_ids: abc.Set[int] = NO_REQUESTS) -> Schedule:
        """See RequestScheduler. Raises InFlightError before anything is moved."""
        if not active:
            return Schedule([], [])
        schedule = self._ask(self._capacity, self._micro_batch, active)
        if not self._idles(schedule) or any(sequence.gated for sequence in active):
            return schedule
        # Without a fallback the engine would stall, with requests waiting.
        self._warnings.on_idle(len(active), len(self.context.cache.holders))
        return self._ask(*self._fallback, active)

    def _ask(
        self, capacity: CapacityScheduler, micro_batch: MicroBatchScheduler, active: abc.Sequence[Sequence]
    ) -> Schedule:
        fitting, preempted = capacity.schedule_request(active)
        if preempted:
            self.pause(preempted)
        # A sequence whose last token is being drawn must not take a place in the batch.
        ready = [sequence for sequence in self._hold(fitting) if sequence.runnable]
        return Schedule(*micro_batch.schedule(ready, NO_REQUESTS))

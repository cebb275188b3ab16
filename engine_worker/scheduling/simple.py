"""Calls the capacity scheduler, carries out its decisions, then calls the micro-batch scheduler."""

from abc import ABC, abstractmethod
from collections import abc
from typing import NamedTuple, Protocol

from engine_worker.request import Sequence, State
from engine_worker.scheduling.context import SchedulerContext, SchedulerWarnings
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching, MicroBatchScheduler

NO_BATCH = (0, 0)
"""The `static_batch` of policies other than static batching."""
NO_REQUESTS: frozenset[int] = frozenset()


class InFlightError(Exception):
    """A sequence to be preempted is in flight: collect its step, which uses its blocks, and schedule again."""


class Schedule(NamedTuple):
    """The sequences of a step. Each of them holds the blocks that it needs."""

    context: list[Chunk]
    generation: list[Sequence]

    @property
    def drafting(self) -> list[Sequence]:
        """The generating sequences whose requests allow drafts."""
        # No call per sequence, because this runs in every step.
        return [sequence for sequence in self.generation if sequence.request.max_drafts]

    @property
    def may_draft(self) -> bool:
        """Whether any of its sequences may have drafts in a later step."""
        return bool(self.drafting) or any(sequence.request.max_drafts for sequence, _ in self.context)


class CapacityScheduler(Protocol):
    """Makes decisions only: the caller allocates and releases blocks."""

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, paused): the sequences to hold blocks for all their tokens, in order, and those to release theirs.

        `active`: all live sequences except awaiting ones, in order. Those in neither list wait, or keep their blocks
        without running.
        """


class RequestScheduler(ABC):
    """Base of schedulers that decide about both capacity and micro batch. Only `hold` and `pause` change blocks."""

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    @property
    def static_batch(self) -> tuple[int, int]:
        """(tokens generated since the static batch began, slots of its ended sequences); zeros for other policies."""
        return NO_BATCH

    @abstractmethod
    def schedule(self, active: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = NO_REQUESTS) -> Schedule:
        """The next step. `active` is in order; `inflight_request_ids`: see MicroBatchScheduler."""

    def hold(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Allocate blocks for all tokens of each sequence, one after the other, all or none; returns the sequences that
        have all their blocks.

        `num_pending` of a newcomer then excludes the tokens that were found in the prefix cache.
        """
        awaiting, ended = State.AWAITING, State.ENDED
        return self._hold([s for s in dict.fromkeys(sequences) if s.state is not ended and s.state is not awaiting])

    def pause(self, sequences: abc.Iterable[Sequence]) -> None:
        """Preempt sequences: release their blocks. Raises InFlightError, with no effect, if one of them is in
        flight."""
        sequences = [sequence for sequence in sequences if sequence.blocks]
        # All are checked first, so that nothing has changed when it raises.
        if any(sequence.num_inflight for sequence in sequences):
            raise InFlightError
        for sequence in sequences:
            self.context.cache.preempt(sequence)
            sequence.state = State.PREEMPTED
            sequence.request.preemptions += 1

    def _idles(self, schedule: Schedule) -> bool:
        """Whether nothing runs, and neither a step in flight nor copies in progress will change that or release
        blocks."""
        if schedule.context or schedule.generation or self.context.cache.retired or self.context.cache.copying:
            return False
        return not any(holder.num_inflight for holder in self.context.cache.holders)

    def _hold(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Like `hold`, for distinct active sequences."""
        held, running = self.context.cache.allocate(sequences), State.RUNNING
        for sequence in held:
            sequence.state = running
        return held


class SimpleScheduler(RequestScheduler):
    """Calls the capacity scheduler, allocates and releases blocks accordingly, then calls the micro-batch scheduler.

    Only sequences that have their blocks run, even if the capacity scheduler named others. If nothing would run
    although sequences are active, for example because all holders wait for more memory, the step is planned by
    MaxUtilization and InFlightBatching instead: with these the first sequence in order can always run.
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
        counts: tuple[int, int] = getattr(self._capacity, "static_batch", NO_BATCH)
        return counts

    def schedule(self, active: abc.Sequence[Sequence], _inflight_request_ids: abc.Set[int] = NO_REQUESTS) -> Schedule:
        """See RequestScheduler. Raises InFlightError before anything is changed."""
        if not active:
            return Schedule([], [])
        schedule = self._schedule_by(self._capacity, self._micro_batch, active)
        if not self._idles(schedule) or any(sequence.gated for sequence in active):
            return schedule
        # Without the fallback the engine would stall while requests wait.
        self._warnings.on_idle(len(active), len(self.context.cache.holders))
        return self._schedule_by(*self._fallback, active)

    def _schedule_by(
        self, capacity: CapacityScheduler, micro_batch: MicroBatchScheduler, active: abc.Sequence[Sequence]
    ) -> Schedule:
        fitting, preempted = capacity.schedule_request(active)
        if preempted:
            self.pause(preempted)
        # A sequence whose last token is being sampled must not take a slot of the batch.
        ready = [sequence for sequence in self._hold(fitting) if sequence.runnable]
        return Schedule(*micro_batch.schedule(ready, NO_REQUESTS))

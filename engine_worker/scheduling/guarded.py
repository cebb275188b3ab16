"""Users' schedulers, so that nothing they do stops the engine or harms the cache.

What is right in an answer is carried out, what is not is left out. Where a scheduler raises, the step is planned
without it.
"""

from collections import Counter, abc
from typing import Any

from engine_worker.request import Sequence
from engine_worker.scheduling.capacity import CapacityScheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching, MicroBatchScheduler
from engine_worker.scheduling.simple import NO_BATCH, InFlightError, RequestScheduler, Schedule, SimpleScheduler
from engine_worker.scheduling.warnings import SchedulerWarnings

MAX_FIGURE = 2**32 - 1
"""Of those that the public API carries."""


class GuardedCapacity:
    """A user's capacity scheduler."""

    def __init__(self, scheduler: CapacityScheduler, complaints: SchedulerWarnings, context: SchedulerContext) -> None:
        self._scheduler = scheduler
        self._sound = MaxUtilization(context)
        self._complaints = complaints

    @property
    def static_batch(self) -> tuple[int, int]:
        """See RequestScheduler."""
        return _static_batch(self._scheduler, self._complaints)

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """See CapacityScheduler."""
        faults: Counter[str] = Counter()
        known = dict.fromkeys(active)
        try:
            fitting, paused = self._scheduler.schedule_request(list(active))
            fitting = _once(fitting, known, faults)
            kept = dict.fromkeys(fitting)
            paused = [sequence for sequence in _once(paused, known, faults) if sequence.blocks]
            faults["paused and fitting"] += sum(sequence in kept for sequence in paused)
        except Exception:  # noqa: BLE001 - it is the user's code: whatever it raises, the engine goes on
            self._complaints.raised()
            return self._sound.schedule_request(active)
        self._complaints.wrong(+faults)
        return fitting, [sequence for sequence in paused if sequence not in kept]


class GuardedMicroBatch:
    """A user's micro-batch scheduler."""

    def __init__(
        self, scheduler: MicroBatchScheduler, complaints: SchedulerWarnings, context: SchedulerContext
    ) -> None:
        self._scheduler = scheduler
        self._context = context
        self._sound = InFlightBatching(context)
        self._complaints = complaints

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]
    ) -> tuple[list[Chunk], list[Sequence]]:
        """See MicroBatchScheduler."""
        known = dict.fromkeys(_not_in_flight(fitting, inflight_request_ids))
        limits = _Limits(known, self._context)
        try:
            context, generation = self._scheduler.schedule(list(fitting), frozenset(inflight_request_ids))
            schedule = limits.apply(context, generation)
        except Exception:  # noqa: BLE001 - it is the user's code: whatever it raises, the engine goes on
            self._complaints.raised()
            return self._sound.schedule(fitting, inflight_request_ids)
        self._complaints.wrong(limits.faults)
        return schedule


class GuardedScheduler(RequestScheduler):
    """A user's scheduler in one piece. Where nobody runs though somebody could, the step is planned without it."""

    def __init__(self, scheduler: RequestScheduler, complaints: SchedulerWarnings, context: SchedulerContext) -> None:
        super().__init__(context)
        self._scheduler = scheduler
        self._sound = SimpleScheduler(context, MaxUtilization(context), InFlightBatching(context), complaints)
        self._complaints = complaints

    @property
    def static_batch(self) -> tuple[int, int]:
        """See RequestScheduler."""
        return _static_batch(self._scheduler, self._complaints)

    def schedule(self, active: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = frozenset()) -> Schedule:
        """See RequestScheduler."""
        if not active:
            return Schedule([], [])
        try:
            context, generation = self._scheduler.schedule(list(active), frozenset(inflight_request_ids))
            schedule = self._checked(list(context), list(generation), active, inflight_request_ids)
        except InFlightError:
            raise
        except Exception:  # noqa: BLE001 - it is the user's code: whatever it raises, the engine goes on
            self._complaints.raised()
            return self._sound.schedule(active, inflight_request_ids)
        if not self._idles(schedule, inflight_request_ids):
            return schedule
        self._complaints.nobody(len(active), len(self.context.cache.holders))
        return self._sound.schedule(active, inflight_request_ids)

    def _checked(
        self,
        context: list[Chunk],
        generation: list[Sequence],
        active: abc.Sequence[Sequence],
        inflight_request_ids: abc.Set[int],
    ) -> Schedule:
        known = dict.fromkeys(_not_in_flight(active, inflight_request_ids))
        named = [*generation, *(sequence for sequence, _ in context)]
        held = dict.fromkeys(self.hold([sequence for sequence in dict.fromkeys(named) if sequence in known]))
        limits = _Limits(held, self.context)
        chunks, generating = limits.apply(context, generation)
        self._complaints.wrong(limits.faults)
        # Of whom the last token is being drawn nothing is to be computed: no fault, but nothing to launch.
        return Schedule([chunk for chunk in chunks if chunk.sequence.due], [s for s in generating if s.due])


class _Limits:
    """What a step may be made of. `faults` counts what was not."""

    def __init__(self, known: abc.Container[Sequence], context: SchedulerContext) -> None:
        self.faults: Counter[str] = Counter()
        self._known = known
        self._seen: set[Sequence] = set()
        self._places = context.max_batch_size
        self._tokens = context.max_tokens_per_step
        self._chunked = context.chunked_context

    def apply(
        self, context: abc.Iterable[Chunk], generation: abc.Iterable[Sequence]
    ) -> tuple[list[Chunk], list[Sequence]]:
        """What may stand of an answer."""
        generating = [sequence for sequence in generation if self._generates(sequence)]
        chunks: list[Chunk] = []
        for sequence, size in context:
            size = self._size(sequence, size, not chunks)
            if size:
                chunks.append(Chunk(sequence, size))
        return chunks, generating

    def _generates(self, sequence: Sequence) -> bool:
        if not self._may_run(sequence):
            return False
        if not sequence.generating:
            return self._fault("a context among generation")
        self._tokens -= 1
        return self._takes(sequence)

    def _size(self, sequence: Sequence, size: int, first: bool) -> int:
        if not self._may_run(sequence):
            return 0
        if type(size) is not int or size < 1:
            return self._fault("a chunk without tokens")
        if size > sequence.num_ready:
            self._fault("a chunk longer than its context")
            size = sequence.num_ready
        if size > self._tokens and (self._chunked or not first):
            self._fault("more than max_tokens_per_step")
            size = self._tokens if self._chunked else 0
        if size > 0:
            self._tokens -= size
            self._takes(sequence)
        return max(0, size)

    def _may_run(self, sequence: Sequence) -> bool:
        if sequence not in self._known:
            return self._fault("not there to run")
        if sequence in self._seen:
            return self._fault("twice")
        if not self._places:
            return self._fault("more than max_batch_size")
        return True

    def _takes(self, sequence: Sequence) -> bool:
        self._seen.add(sequence)
        self._places -= 1
        return True

    def _fault(self, what: str) -> bool:
        self.faults[what] += 1
        return False


def _static_batch(scheduler: Any, complaints: SchedulerWarnings) -> tuple[int, int]:
    """The user's figures, if it has any."""
    try:
        tokens, slots = scheduler.static_batch
    except AttributeError as error:
        if error.obj is not scheduler or error.name != "static_batch":
            complaints.raised()
        return NO_BATCH
    except Exception:  # noqa: BLE001 - it is the user's code: whatever it raises, the engine goes on
        complaints.raised()
        return NO_BATCH
    if all(type(figure) is int and 0 <= figure <= MAX_FIGURE for figure in (tokens, slots)):
        return tokens, slots
    complaints.wrong(Counter({"static_batch is not two counts": 1}))
    return NO_BATCH


def _once(answer: abc.Iterable[Sequence], known: abc.Container[Sequence], faults: Counter[str]) -> list[Sequence]:
    """What is known of an answer, each once."""
    told = list(answer)
    found = [sequence for sequence in dict.fromkeys(told) if sequence in known]
    faults["not active, or twice"] += len(told) - len(found)
    return found


def _not_in_flight(sequences: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]) -> abc.Sequence[Sequence]:
    if not inflight_request_ids:
        return sequences
    return [s for s in sequences if s.request.spec.request not in inflight_request_ids]

"""Wrappers of custom schedulers that keep their errors from stopping the engine or corrupting the cache.

The valid part of an answer is used. If a scheduler raises, the step is planned by the default policies. This includes
SystemExit and other BaseExceptions, since no signal handler of an engine raises any.
"""

from collections import Counter, abc
from collections.abc import Callable
from typing import Any, TypeVar

from engine_worker.request import Sequence
from engine_worker.scheduling.context import SchedulerContext, SchedulerWarnings
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching, MicroBatchScheduler
from engine_worker.scheduling.simple import (
    NO_BATCH,
    NO_REQUESTS,
    CapacityScheduler,
    InFlightError,
    RequestScheduler,
    Schedule,
    SimpleScheduler,
)

T = TypeVar("T")

MAX_COUNT = 2**32 - 1
"""The largest value of the public API's fields (uint32)."""


class GuardedCapacity:
    def __init__(self, scheduler: CapacityScheduler, warnings: SchedulerWarnings, context: SchedulerContext) -> None:
        self._scheduler = scheduler
        self._fallback = MaxUtilization(context)
        self._warnings = warnings

    @property
    def static_batch(self) -> tuple[int, int]:
        return _static_batch(self._scheduler, self._warnings)

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        faults: Counter[str] = Counter()
        known = dict.fromkeys(active)

        def answer() -> tuple[list[Sequence], list[Sequence]]:
            # A copy, because the custom code may modify it.
            fitting, paused = self._scheduler.schedule_request(list(active))
            fitting = _known_once(fitting, known, faults)
            in_fitting = dict.fromkeys(fitting)
            paused = [sequence for sequence in _known_once(paused, known, faults) if sequence.blocks]
            faults["paused and fitting"] += sum(sequence in in_fitting for sequence in paused)
            self._warnings.on_faults(+faults)
            return fitting, [sequence for sequence in paused if sequence not in in_fitting]

        return _guarded(answer, lambda: self._fallback.schedule_request(active), self._warnings)


class GuardedMicroBatch:
    def __init__(self, scheduler: MicroBatchScheduler, warnings: SchedulerWarnings, context: SchedulerContext) -> None:
        self._scheduler = scheduler
        self._context = context
        self._fallback = InFlightBatching(context)
        self._warnings = warnings

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]
    ) -> tuple[list[Chunk], list[Sequence]]:
        limits = _Limits(dict.fromkeys(fitting), self._context)

        def answer() -> tuple[list[Chunk], list[Sequence]]:
            schedule = limits.apply(*self._scheduler.schedule(list(fitting), inflight_request_ids))
            self._warnings.on_faults(limits.faults)
            return schedule

        return _guarded(answer, lambda: self._fallback.schedule(fitting, inflight_request_ids), self._warnings)


class GuardedScheduler(RequestScheduler):
    """Also replaces an answer with which nothing runs although something could."""

    def __init__(self, scheduler: RequestScheduler, warnings: SchedulerWarnings, context: SchedulerContext) -> None:
        super().__init__(context)
        self._scheduler = scheduler
        self._fallback = SimpleScheduler(context, MaxUtilization(context), InFlightBatching(context), warnings)
        self._warnings = warnings

    @property
    def static_batch(self) -> tuple[int, int]:
        return _static_batch(self._scheduler, self._warnings)

    def schedule(self, active: abc.Sequence[Sequence], _inflight_request_ids: abc.Set[int] = NO_REQUESTS) -> Schedule:
        if not active:
            return Schedule([], [])

        def answer() -> Schedule | None:
            context, generation = self._scheduler.schedule(list(active), NO_REQUESTS)
            return self._checked(list(context), list(generation), active)

        # InFlightError is not a fault: the engine collects the step and calls again.
        schedule = _guarded(answer, lambda: None, self._warnings, InFlightError)
        if schedule is None:
            return self._fallback.schedule(active)
        if not self._idles(schedule) or any(sequence.gated for sequence in active):
            return schedule
        self._warnings.on_idle(len(active), len(self.context.cache.holders))
        return self._fallback.schedule(active)

    def _checked(self, context: list[Chunk], generation: list[Sequence], active: abc.Sequence[Sequence]) -> Schedule:
        known = dict.fromkeys(active)
        named = [*generation, *(sequence for sequence, _ in context)]
        held = dict.fromkeys(self.hold([sequence for sequence in dict.fromkeys(named) if sequence in known]))
        limits = _Limits(held, self.context)
        chunks, generating = limits.apply(context, generation)
        self._warnings.on_faults(limits.faults)
        # A sequence whose last token is being sampled may be named, but has nothing left to compute.
        return Schedule([chunk for chunk in chunks if chunk.sequence.runnable], [s for s in generating if s.runnable])


class _Limits:
    """Reduces an answer to a valid step; `faults` counts its faults by kind."""

    def __init__(self, known: abc.Container[Sequence], context: SchedulerContext) -> None:
        self.faults: Counter[str] = Counter()
        self._known = known
        self._seen: set[Sequence] = set()
        self._slots = context.max_batch_size
        self._tokens = context.max_tokens_per_step
        self._chunked = context.chunked_context

    def apply(
        self, context: abc.Iterable[Chunk], generation: abc.Iterable[Sequence]
    ) -> tuple[list[Chunk], list[Sequence]]:
        generating = [sequence for sequence in generation if self._may_generate(sequence)]
        chunks: list[Chunk] = []
        for sequence, size in context:
            size = self._valid_size(sequence, size, not chunks)
            if size:
                chunks.append(Chunk(sequence, size))
        return chunks, generating

    def _may_generate(self, sequence: Sequence) -> bool:
        if not self._may_run(sequence):
            return False
        if not sequence.generating:
            return self._fault("a context sequence in generation")
        self._tokens -= 1
        return self._add(sequence)

    def _valid_size(self, sequence: Sequence, size: int, first: bool) -> int:
        """Tokens of a chunk that are valid; 0 if it must be dropped."""
        if not self._may_run(sequence):
            return 0
        # Not isinstance: True would pass as 1.
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
            self._add(sequence)
        return max(0, size)

    def _may_run(self, sequence: Sequence) -> bool:
        if sequence not in self._known:
            return self._fault("not among those that can run")
        if sequence in self._seen:
            return self._fault("named twice")
        if not self._slots:
            return self._fault("more than max_batch_size")
        return True

    def _add(self, sequence: Sequence) -> bool:
        self._seen.add(sequence)
        self._slots -= 1
        return True

    def _fault(self, what: str) -> bool:
        self.faults[what] += 1
        return False


def _static_batch(scheduler: Any, warnings: SchedulerWarnings) -> tuple[int, int]:
    """The counts of a custom scheduler; zeros if it has none or they are invalid."""

    def answer() -> tuple[Any, Any]:
        try:
            tokens, slots = scheduler.static_batch
        except AttributeError as error:
            # The property is optional, but it must not raise AttributeError itself.
            if error.obj is scheduler and error.name == "static_batch":
                return NO_BATCH
            raise
        return tokens, slots

    tokens, slots = _guarded(answer, lambda: NO_BATCH, warnings)
    if all(type(count) is int and 0 <= count <= MAX_COUNT for count in (tokens, slots)):
        return tokens, slots
    warnings.on_faults(Counter({"static_batch is not two counts": 1}))
    return NO_BATCH


def _guarded(
    answer: Callable[[], T],
    otherwise: Callable[[], T],
    warnings: SchedulerWarnings,
    *passed: type[Exception],
) -> T:
    """The answer of custom code. If it raises anything but the exceptions `passed`, that is logged, and the result is
    `otherwise`."""
    try:
        return answer()
    except passed:
        raise
    except BaseException:  # noqa: BLE001 - custom code may raise anything, and the engine must continue
        warnings.on_exception()
    return otherwise()


def _known_once(answer: abc.Iterable[Sequence], known: abc.Container[Sequence], faults: Counter[str]) -> list[Sequence]:
    """The sequences of an answer that are active, without duplicates."""
    named = list(answer)
    valid = [sequence for sequence in dict.fromkeys(named) if sequence in known]
    faults["not active, or named twice"] += len(named) - len(valid)
    return valid

"""STATIC_BATCH of TensorRT-LLM: one batch after the other, for comparison and for those who rely on it."""

from collections import abc

from engine_worker.request import Request, Sequence
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.guaranteed_no_evict import GuaranteedNoEvict


class StaticBatch:
    """Fills a batch in order with whoever has the memory to end in it; nobody joins until all of it has ended."""

    def __init__(self, context: SchedulerContext) -> None:
        self._reserving = GuaranteedNoEvict(context)
        self._batch: dict[Request, None] = {}

    @property
    def total_generation_tokens(self) -> int:
        """Tokens generated since the batch began."""
        return sum(sequence.num_drawn for request in self._batch for sequence in request.sequences)

    @property
    def empty_generation_slots(self) -> int:
        """Sequences of the batch that have ended and whose places nobody takes."""
        return sum(len(request.sequences) - request.num_live for request in self._batch)

    @property
    def static_batch(self) -> tuple[int, int]:
        """See RequestScheduler."""
        return self.total_generation_tokens, self.empty_generation_slots

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """See CapacityScheduler."""
        if any(request.num_live for request in self._batch):
            return self._reserving.schedule_request([s for s in active if s.request in self._batch])
        fitting, awaiting = self._reserving.admit(active)
        self._batch = dict.fromkeys(sequence.request for sequence in (*fitting, *awaiting))
        return fitting, []

"""Who runs in the next step, and how far: the second question of scheduling."""

from collections import abc
from typing import NamedTuple, Protocol

from engine_worker.request import Sequence
from engine_worker.scheduling.chunking import equal_progress, first_come_first_served, whole
from engine_worker.scheduling.context import SchedulerContext


class Chunk(NamedTuple):
    """Context work: the next `num_tokens` pending ones of a sequence."""

    sequence: Sequence
    num_tokens: int


class MicroBatchScheduler(Protocol):
    """Decides and moves nothing."""

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]
    ) -> tuple[list[Chunk], list[Sequence]]:
        """(context, generation) of the next step, from the holders of blocks, in order; nothing that is in flight."""
        ...


class InFlightBatching:
    """Generation first, then context under what is left of the token budget, chunked by policy or whole.

    All sequences of a step have one beam width: that of the first in order. When that ends another becomes the first,
    so every width gets its turn.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._max_batch_size = context.max_batch_size
        self._max_tokens_per_step = context.max_tokens_per_step
        self._chunked = context.chunked_context
        self._unit = context.cache.tokens_per_block
        self._share = equal_progress if context.context_chunking_policy == "equal_progress" else first_come_first_served

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]
    ) -> tuple[list[Chunk], list[Sequence]]:
        """See MicroBatchScheduler."""
        if inflight_request_ids:
            fitting = [s for s in fitting if s.request.spec.request not in inflight_request_ids]
        width = fitting[0].request.beam_width if fitting else 1
        fitting = [sequence for sequence in fitting if sequence.request.beam_width == width]
        generation = [sequence for sequence in fitting if sequence.generating]
        waiting = (
            [sequence for sequence in fitting if not sequence.generating] if len(generation) < len(fitting) else []
        )
        del generation[self._max_batch_size :]
        return self._context(waiting, len(generation)), generation

    def _context(self, waiting: list[Sequence], generating: int) -> list[Chunk]:
        if not waiting:
            return []
        del waiting[self._max_batch_size - generating :]
        budget = self._max_tokens_per_step - generating
        sizes = self._share(waiting, budget, self._unit) if self._chunked else whole(waiting, budget)
        return [Chunk(sequence, size) for sequence, size in zip(waiting, sizes, strict=False) if size]

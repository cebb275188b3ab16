"""Who runs in the next step, and how far: the second question of scheduling."""

from collections import abc
from typing import NamedTuple, Protocol

from engine_worker.request import Sequence


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
    """Generation first, then context in order under what is left of the token budget.

    With chunking a context takes what budget there is and goes on in the next step. Without, it waits until it fits
    whole; the first one in line runs however long it is, for it could wait for ever.
    Raises ValueError where a full batch of generation would leave context no token.
    """

    def __init__(self, max_batch_size: int, max_tokens_per_step: int, chunked_context: bool) -> None:
        if not 1 <= max_batch_size <= max_tokens_per_step:
            raise ValueError(
                f"max_batch_size must be from 1 to max_tokens_per_step, got {max_batch_size} and {max_tokens_per_step}"
            )
        self._max_batch_size = max_batch_size
        self._max_tokens_per_step = max_tokens_per_step
        self._chunked_context = chunked_context

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]
    ) -> tuple[list[Chunk], list[Sequence]]:
        """See MicroBatchScheduler."""
        generation: list[Sequence] = []
        waiting: list[Sequence] = []
        for sequence in fitting:
            if inflight_request_ids and sequence.request.spec.request in inflight_request_ids:
                continue
            (generation if sequence.generating else waiting).append(sequence)
        del generation[self._max_batch_size :]
        return self._context(waiting, len(generation)), generation

    def _context(self, waiting: list[Sequence], generating: int) -> list[Chunk]:
        context: list[Chunk] = []
        budget = self._max_tokens_per_step - generating
        for sequence in waiting[: self._max_batch_size - generating]:
            count = min(sequence.num_pending, budget) if self._chunked_context else sequence.num_pending
            if (context and budget < count) or budget < 1:
                break
            context.append(Chunk(sequence, count))
            budget -= count
        return context

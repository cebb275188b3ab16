"""Decides which holders of memory run in the next step, and how many tokens of each."""

from collections import abc
from typing import NamedTuple, Protocol

from engine_worker.request import Sequence
from engine_worker.scheduling.context import SchedulerContext


class Chunk(NamedTuple):
    """Context work: the next `num_tokens` pending tokens of a sequence."""

    sequence: Sequence
    num_tokens: int


class MicroBatchScheduler(Protocol):
    """Makes decisions only: the caller launches the step."""

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int]
    ) -> tuple[list[Chunk], list[Sequence]]:
        """(context, generation) of the next step. `fitting`: the sequences that hold their blocks, in order.

        `inflight_request_ids`, as in TensorRT-LLM: requests to leave out. This engine passes none, because it schedules
        in-flight sequences too.
        """


class InFlightBatching:
    """Generation first, then context within the rest of the token budget, chunked by policy or whole."""

    def __init__(self, context: SchedulerContext) -> None:
        self._max_batch_size = context.max_batch_size
        self._max_tokens_per_step = context.max_tokens_per_step
        self._chunked = context.chunked_context
        self._unit = context.cache.tokens_per_block
        self._share = equal_progress if context.context_chunking_policy == "equal_progress" else first_come_first_served

    def schedule(
        self, fitting: abc.Sequence[Sequence], inflight_request_ids: abc.Set[int] = frozenset()
    ) -> tuple[list[Chunk], list[Sequence]]:
        if inflight_request_ids:
            fitting = [s for s in fitting if s.request.submit.request not in inflight_request_ids]
        generation = [sequence for sequence in fitting if sequence.generating]
        # Usually all are generating, which makes the second pass unnecessary.
        mixed = len(generation) < len(fitting)
        waiting = [sequence for sequence in fitting if not sequence.generating] if mixed else []
        del generation[self._max_batch_size :]
        return self._context(waiting, len(generation)), generation

    def _context(self, waiting: list[Sequence], generating: int) -> list[Chunk]:
        if not waiting:
            return []
        del waiting[self._max_batch_size - generating :]
        budget = self._max_tokens_per_step - generating
        sizes = self._share(waiting, budget, self._unit) if self._chunked else whole(waiting, budget)
        return [Chunk(sequence, size) for sequence, size in zip(waiting, sizes, strict=False) if size]


# The chunking policies, which are TensorRT-LLM's, distribute a budget of tokens among contexts in order, in units of
# one block, or of the budget if that is smaller. A chunk that does not finish its context ends at the end of a unit, so
# some of the budget may remain unused; the first context always receives tokens.


def first_come_first_served(waiting: abc.Sequence[Sequence], budget: int, unit: int) -> list[int]:
    """Tokens of each context: all ready tokens of one context after the other."""
    sizes: list[int] = []
    unit = min(unit, budget)
    for sequence in waiting:
        size = sequence.num_ready
        if size > budget:
            size = max(0, _floor(sequence.num_scheduled + budget, unit) - sequence.num_scheduled)
            size = _leave_several(sequence, size, unit, is_first=not sizes)
        sizes.append(size)
        budget -= size
        # Not at the first context that was cut: the rest of the budget may finish a later one.
        if budget < 1:
            break
    return sizes


def equal_progress(waiting: abc.Sequence[Sequence], budget: int, unit: int) -> list[int]:
    """Tokens of each context: one unit each in turn, until the budget is too small for one of them in a round."""
    sizes, unit, turn = [0] * len(waiting), min(unit, budget), list(enumerate(waiting))
    while turn and budget:
        unfinished, short = [], False
        for index, sequence in turn:
            start = sequence.num_scheduled + sizes[index]
            more = min(_floor(start, unit) + unit - start, sequence.num_ready - sizes[index])
            if more > budget:
                short = True
                continue
            sizes[index] += more
            budget -= more
            if sizes[index] < sequence.num_ready:
                unfinished.append((index, sequence))
        turn = [] if short else unfinished
    # The first one last, so that it receives what the others leave.
    for index, sequence in reversed(list(enumerate(waiting))):
        size = _leave_several(sequence, sizes[index], unit, spare=budget, is_first=not index)
        budget += sizes[index] - size
        sizes[index] = size
    return sizes


def whole(waiting: abc.Sequence[Sequence], budget: int) -> list[int]:
    """Tokens of the leading contexts that fit without chunking."""
    sizes: list[int] = []
    for sequence in waiting:
        # The first one runs regardless of its length: otherwise it might never run.
        size = sequence.num_alike
        if sizes and size > budget:
            break
        sizes.append(size)
        budget -= size
    return sizes


def _leave_several(sequence: Sequence, size: int, unit: int, spare: int = 0, *, is_first: bool) -> int:
    """`size`, unless the chunk would leave a single token of the prompt: alone, it would be computed in the shape of a
    generated token. Then the chunk includes it if the budget has `spare` tokens, or else is a unit shorter.

    Only the first context may end within a unit, because it always receives tokens: a u8 KV cache would quantize the
    keys of this block in two parts, which changes their values."""
    request = sequence.request
    if request.recompute is None or sequence.num_scheduled + size != request.num_prompt - 1:
        return size
    if size and spare and sequence.num_ready > size:
        return size + 1
    if size > unit or not is_first:
        return max(size - unit, 0)
    return max(min(size, 1), size - 1)


def _floor(position: int, unit: int) -> int:
    return position // unit * unit

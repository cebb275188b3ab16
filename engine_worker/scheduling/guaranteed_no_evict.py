"""GUARANTEED_NO_EVICT of TensorRT-LLM: whoever starts has the memory to end."""

from collections import abc

from engine_worker.kvcache.forecast import Forecast
from engine_worker.request import IN_ORDER, Request, Sequence, State
from engine_worker.scheduling.capacity import BlockedHead, Holders
from engine_worker.scheduling.context import SchedulerContext


class GuaranteedNoEvict:
    """Pauses nobody, ever: a request starts only when blocks for prompt and max_tokens of all its sequences are there.

    Blocks of a cached prefix are saved only while somebody else holds them, for only then nobody can take them; what
    sequences of one request will share after the prompt is not counted on, for the first of them may be gone by then.
    Nobody overtakes a request that does not fit yet, so a big one gets its turn. One whose sequences are too much for
    the whole pool together, or for the batch, starts when nobody else holds memory, and they take turns. One whose next
    block is just being computed by another waits for that, and the room that it will need is kept.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._cache = context.cache
        self._holders = Holders(context.cache)
        self._refusal = BlockedHead(context.cache)
        self._max_batch_size = context.max_batch_size

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """See CapacityScheduler."""
        return self.admit(active)[0], []

    def admit(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, awaiting): who shall hold blocks, in order; whose room is kept while another computes for it."""
        fitting = self._holders.in_order()
        if len(fitting) == min(len(active), self._max_batch_size):
            return fitting, []
        apart = [sequence for sequence in active if not sequence.blocks and sequence.request.begun]
        if fitting and not apart and self._refusal.stands(active, self._holders.changes):
            return fitting, []
        forecast = self._cache.forecast()
        for holder in fitting:
            forecast.grow(holder)
        newcomers: list[Sequence] = []
        awaiting: list[Sequence] = []
        for sequence in self._admitted(active, apart, _Room(forecast, self._max_batch_size, fitting)):
            (awaiting if forecast.awaits(sequence) else newcomers).append(sequence)
        return (sorted([*fitting, *newcomers], key=IN_ORDER) if newcomers else fitting), awaiting

    def _admitted(self, active: abc.Sequence[Sequence], apart: list[Sequence], room: "_Room") -> abc.Iterator[Sequence]:
        """Those of requests that have begun, but who only now go `apart` from the one that computed their prompt, come
        before whoever has not begun. All sequences of a request that resumes begin together.
        """
        for sequence in apart:
            if not room.continues(sequence):
                return
            yield sequence
        seen: set[Request] = set()
        for sequence in active:
            request = sequence.request
            if request.begun or request in seen:
                continue
            seen.add(request)
            if not room.begins(sequence):
                self._refusal.note(sequence, self._holders.changes)
                return
            yield sequence
            for other in request.sequences:
                if other is sequence or other.state is not State.WAITING:
                    continue
                if not room.continues(other):
                    return
                yield other


class _Room:
    """What is left of blocks and of places in the batch when everybody who began has what it may come to need."""

    def __init__(self, forecast: Forecast, max_batch_size: int, holders: list[Sequence]) -> None:
        self._forecast = forecast
        self._max_batch_size = max_batch_size
        self._places = max_batch_size - len(holders)
        self._growing = sum(map(forecast.growth_to_end, holders))
        """Blocks that those who hold memory have yet to take."""
        self._coming = 0
        """Blocks of sequences that await a prompt which is being computed."""
        self._empty = not holders
        for holder in holders:
            self._expect(holder)

    def continues(self, sequence: Sequence) -> bool:
        """Give a sequence of a request that has begun its room, if it is there."""
        given = self._places > 0 and self._give(sequence, 0)
        if given:
            self._expect(sequence)
        return given

    def begins(self, sequence: Sequence) -> bool:
        """Give a request, whose first sequence this is, room for all of its sequences, if it is there."""
        request = sequence.request
        others = self._forecast.blocks_to_end(sequence) * (request.num_live - 1)
        if self._empty and not self._could_ever(sequence):
            begun = self._give(sequence, 0)
        else:
            begun = request.num_live <= self._places and self._give(sequence, self._coming + others)
        if begun:
            self._expect(sequence)
        return begun

    def _could_ever(self, sequence: Sequence) -> bool:
        count = sequence.request.num_live
        blocks = self._forecast.blocks_to_end(sequence) * count
        return count <= self._max_batch_size and blocks <= self._forecast.num_blocks

    def _give(self, sequence: Sequence, apart_from: int) -> bool:
        growth = self._forecast.growth_to_end(sequence)
        if not self._forecast.admit(sequence, self._growing + growth + apart_from):
            return False
        self._growing += growth
        self._places -= 1
        self._empty = False
        return True

    def _expect(self, sequence: Sequence) -> None:
        """Those who await the prompt that this one computes, if it does, will have the room that they were promised."""
        if sequence.output or sequence.request.num_live == 1:
            return
        awaiting = sequence.request.awaiting()
        self._coming += sum(map(self._forecast.blocks_to_end, awaiting))
        self._places -= len(awaiting)

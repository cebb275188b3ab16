"""TensorRT-LLM's GUARANTEED_NO_EVICT and STATIC_BATCH: a request starts only when there is enough memory to finish
it."""

from collections import abc

from engine_worker.kvcache.forecast import Forecast
from engine_worker.request import IN_ORDER, Request, Sequence, State
from engine_worker.scheduling.context import Holders, SchedulerContext


class GuaranteedNoEvict:
    """Never preempts: a request starts only when there are blocks for prompt and max_tokens of all its sequences.

    - Blocks of a cached prefix reduce the blocks that it needs only while another sequence holds them; otherwise they
      could be evicted. Blocks that its own sequences will share are not deducted: the first of them may have ended
      before the others start.
    - A request that does not fit is not overtaken, so that large requests are not starved.
    - A request whose sequences together exceed the pool or the batch starts when no sequence holds memory; its
      sequences take turns.
    - A sequence whose next block is being computed by another sequence waits for it. Its blocks are reserved meanwhile.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._cache = context.cache
        self._holders = Holders(context.cache)
        self._max_batch_size = context.max_batch_size

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        return self.admit(active)[0], []

    def admit(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, awaiting): the sequences to hold blocks, in order; those with reserved blocks that wait for another
        sequence to compute their next block."""
        fitting = self._holders.in_order()
        if len(fitting) == min(len(active), self._max_batch_size):
            return fitting, []
        siblings = [sequence for sequence in active if not sequence.blocks and sequence.request.begun]
        if fitting and not siblings and self._holders.is_head_blocked(active):
            return fitting, []
        forecast = self._cache.forecast()
        for holder in fitting:
            # Cannot fail: all blocks that it may need are reserved.
            forecast.grow(holder)
        newcomers: list[Sequence] = []
        awaiting: list[Sequence] = []
        for sequence in self._admitted(active, siblings, _Reservation(forecast, self._max_batch_size, fitting)):
            (awaiting if forecast.awaits(sequence) else newcomers).append(sequence)
        return (sorted([*fitting, *newcomers], key=IN_ORDER) if newcomers else fitting), awaiting

    def _admitted(
        self, active: abc.Sequence[Sequence], siblings: list[Sequence], room: "_Reservation"
    ) -> abc.Iterator[Sequence]:
        # First the waiting sequences of requests that have begun: blocks are reserved for them, and a sibling has
        # computed their prompt.
        for sequence in siblings:
            if not room.reserve_sequence(sequence):
                return
            yield sequence
        seen: set[Request] = set()
        for sequence in active:
            request = sequence.request
            if request.begun or request in seen:
                continue
            seen.add(request)
            if not room.reserve_request(sequence):
                self._holders.record_blocked(sequence)
                return
            yield sequence
            # Several sequences wait only if the request was resumed: they begin together.
            for sibling in request.sequences:
                if sibling is not sequence and sibling.state is State.WAITING:
                    if not room.reserve_sequence(sibling):
                        return
                    yield sibling


class _Reservation:
    """The blocks and batch slots that remain if those that running requests may still need are set aside."""

    def __init__(self, forecast: Forecast, max_batch_size: int, holders: list[Sequence]) -> None:
        self._forecast = forecast
        self._max_batch_size = max_batch_size
        self._slots = max_batch_size - len(holders)
        self._growing = sum(map(forecast.growth_to_end, holders))
        """Blocks that holders may still need."""
        self._awaiting = 0
        """Blocks for sequences that await a prompt which is being computed."""
        self._empty = not holders
        for holder in holders:
            self._expect(holder)

    def reserve_sequence(self, sequence: Sequence) -> bool:
        """Reserve room for one sequence of a request that has begun; False if there is too little."""
        return self._slots > 0 and self._reserve(sequence, 0)

    def reserve_request(self, first: Sequence) -> bool:
        """Reserve room for all sequences of a request, given the first; False if there is too little."""
        count, blocks_each = first.request.num_live, self._forecast.blocks_to_end(first)
        fits_alone = count <= self._max_batch_size and count * blocks_each <= self._forecast.num_blocks
        # Too large even for an empty pool and batch: it runs alone, and its sequences take turns.
        if self._empty and not fits_alone:
            return self._reserve(first, 0)
        return count <= self._slots and self._reserve(first, self._awaiting + (count - 1) * blocks_each)

    def _reserve(self, sequence: Sequence, headroom: int) -> bool:
        """`headroom`: blocks that must remain for sequences other than this one and the holders."""
        growth = self._forecast.growth_to_end(sequence)
        if not self._forecast.admit(sequence, self._growing + growth + headroom):
            return False
        self._growing += growth
        self._slots -= 1
        self._empty = False
        self._expect(sequence)
        return True

    def _expect(self, sequence: Sequence) -> None:
        """Set room aside for the siblings that await the prompt which this sequence computes, if there are any."""
        if sequence.output or sequence.request.num_live == 1:
            return
        awaiting = sequence.request.awaiting()
        self._awaiting += sum(map(self._forecast.blocks_to_end, awaiting))
        self._slots -= len(awaiting)


class StaticBatch:
    """Fills a batch with requests for which there is enough memory to finish; no request joins until all have ended."""

    def __init__(self, context: SchedulerContext) -> None:
        self._no_evict = GuaranteedNoEvict(context)
        self._batch: dict[Request, None] = {}
        self._empty_slots = 0
        """Slots of the batch whose sequences had ended when the newest step was planned."""

    @property
    def static_batch(self) -> tuple[int, int]:
        tokens = sum(sequence.num_drawn for request in self._batch for sequence in request.sequences)
        return tokens, self._empty_slots

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        self._empty_slots = sum(len(request.sequences) - request.num_live for request in self._batch)
        if any(request.num_live for request in self._batch):
            return self._no_evict.schedule_request([s for s in active if s.request in self._batch])
        fitting, awaiting = self._no_evict.admit(active)
        self._batch = dict.fromkeys(sequence.request for sequence in (*fitting, *awaiting))
        self._empty_slots = 0
        return fitting, []

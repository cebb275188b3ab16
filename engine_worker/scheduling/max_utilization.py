"""MAX_UTILIZATION of TensorRT-LLM: as many at a time as the pool holds now."""

from collections import abc

from engine_worker.kvcache.forecast import Forecast
from engine_worker.request import IN_ORDER, Sequence
from engine_worker.scheduling.capacity import BlockedHead, Holders
from engine_worker.scheduling.context import SchedulerContext


class MaxUtilization:
    """Fills the pool, and pauses the last in order when blocks run out.

    A holder is paused only for one before it in order, so the first always runs on. A sequence is admitted only in its
    turn, and only where everybody could then get through the contexts at hand and a block's worth of tokens more:
    whoever was just resumed gets somewhere before it can be paused again. One whose next block is just being computed
    by another waits for that, and the line goes on behind it.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._cache = context.cache
        self._holders = Holders(context.cache)
        self._refusal = BlockedHead(context.cache)
        self._max_batch_size = context.max_batch_size
        self._max_tokens_per_step = context.max_tokens_per_step

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """See CapacityScheduler."""
        fitting = self._holders.in_order()
        forecast = self._cache.forecast()
        if not all(forecast.grow(sequence) for sequence in fitting if sequence.num_tokens > sequence.num_placed):
            return self._keep(fitting)
        room = len(fitting) < min(len(active), self._max_batch_size)
        if room and not (fitting and self._refusal.stands(active, self._holders.changes)):
            self._admit(active, fitting, forecast)
        return fitting, []

    def _keep(self, keeping: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Nobody is admitted in the step that pauses somebody."""
        forecast, kept, paused = self._cache.forecast(), 0, []
        while kept < len(keeping):
            if forecast.grow(keeping[kept]):
                kept += 1
            else:
                paused.append(keeping.pop())
                forecast.release(paused[-1])
        return keeping, paused

    def _admit(self, active: abc.Sequence[Sequence], fitting: list[Sequence], forecast: Forecast) -> None:
        held = len(fitting)
        headroom = _Headroom(forecast, fitting, self._max_tokens_per_step, self._cache.tokens_per_block)
        for sequence in active:
            if sequence.blocks:
                continue
            if len(fitting) >= self._max_batch_size:
                break
            wanted = headroom.wanted(sequence)
            # It needs a block at least: where there is none, nobody has to look for its prefix.
            room = wanted < forecast.available
            if room and forecast.awaits(sequence):
                continue
            if not (room and forecast.admit(sequence, wanted)):
                self._refusal.note(sequence, self._holders.changes)
                break
            headroom.add(sequence)
            fitting.append(sequence)
        if len(fitting) > held:
            fitting.sort(key=IN_ORDER)


class _Headroom:
    """Blocks that some sequences could want before all their contexts and a block's worth of tokens each are computed.

    Each newcomer lengthens the way of all. That is counted afresh only when the way gets longer than what was counted
    by an eighth, so that admitting many at once costs little more than one after the other.
    """

    def __init__(self, forecast: Forecast, sequences: list[Sequence], tokens_per_step: int, tokens: int) -> None:
        self._growth = forecast.growth
        self._sequences = list(sequences)
        self._tokens_per_step = tokens_per_step
        self._tokens = tokens
        contexts = [sequence.num_pending for sequence in sequences if not sequence.generating]
        self._num_contexts, self._context_tokens = len(contexts), sum(contexts)
        self._way = self._blocks = 0

    def wanted(self, newcomer: Sequence) -> int:
        """Of all so far and this one."""
        for_contexts = max(1, self._tokens_per_step - len(self._sequences) - 1)
        way = self._num_contexts + 1 + (self._context_tokens + newcomer.num_pending) // for_contexts + self._tokens
        if way > self._way:
            self._way = way + way // 8 if self._way else way
            self._blocks = sum(self._growth(sequence, self._way) for sequence in self._sequences)
        return self._blocks + self._growth(newcomer, self._way)

    def add(self, newcomer: Sequence) -> None:
        """It is admitted."""
        self._blocks += self._growth(newcomer, self._way)
        self._sequences.append(newcomer)
        self._num_contexts += 1
        self._context_tokens += newcomer.num_pending

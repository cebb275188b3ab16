"""TensorRT-LLM's MAX_UTILIZATION: as many sequences as the pool can hold now."""

from collections import abc

from engine_worker.kvcache.forecast import Forecast
from engine_worker.request import IN_ORDER, Sequence
from engine_worker.scheduling.context import Holders, SchedulerContext


class MaxUtilization:
    """Fills the pool, and preempts the last sequences in order when blocks run out.

    - A holder is preempted only for a sequence before it in order, so the first one is never preempted.
    - Sequences are admitted in order, and only if all admitted ones could then finish their contexts and one block of
      tokens more. Otherwise a resumed sequence could be preempted again before it made any progress.
    - A sequence whose next block is being computed by another sequence waits for it. It does not block those after it.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._cache = context.cache
        self._holders = Holders(context.cache)
        self._max_batch_size = context.max_batch_size
        self._max_tokens_per_step = context.max_tokens_per_step

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        fitting = self._holders.in_order()
        growing = [sequence for sequence in fitting if sequence.num_tokens > sequence.num_placed]
        room = len(fitting) < min(len(active), self._max_batch_size)
        # Most steps need no new block and have no waiting sequence, and so need no forecast.
        if not (growing or room):
            return fitting, []
        forecast = self._cache.forecast()
        if not all(map(forecast.grow, growing)):
            # Blocks that are being copied are soon available: until then, those that need more do not run.
            return (fitting, []) if self._cache.copying else self._preempt(fitting)
        if room and not (fitting and self._holders.is_head_blocked(active)):
            self._admit(active, fitting, forecast)
        return fitting, []

    def _preempt(self, holders: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(kept, preempted). Modifies `holders`."""
        # A new forecast, because the caller's includes some grown holders.
        forecast, kept, preempted = self._cache.forecast(), 0, []
        while kept < len(holders):
            if forecast.grow(holders[kept]):
                kept += 1
            else:
                preempted.append(holders.pop())
                forecast.release(preempted[-1])
        return holders, preempted

    def _admit(self, active: abc.Sequence[Sequence], fitting: list[Sequence], forecast: Forecast) -> None:
        """Add the waiting sequences that fit to `fitting`, which stays in order."""
        num_holders = len(fitting)
        headroom = _Headroom(forecast, fitting, self._max_tokens_per_step, self._cache.tokens_per_block)
        for sequence in active:
            if sequence.blocks:
                continue
            if len(fitting) >= self._max_batch_size:
                break
            needed = headroom.needed(sequence)
            # It needs at least one block: if no block is free, skip the look-up of its prefix.
            room = needed < forecast.available
            if room and forecast.awaits(sequence):
                continue
            if not (room and forecast.admit(sequence, needed)):
                self._holders.record_blocked(sequence)
                break
            headroom.add(sequence)
            fitting.append(sequence)
        if len(fitting) > num_holders:
            fitting.sort(key=IN_ORDER)


class _Headroom:
    """Blocks that the admitted sequences could need until all their contexts and one block of tokens each are computed.

    The number of steps until then is the horizon; each newcomer extends it for all. The blocks are counted for a
    horizon that is an eighth longer, and counted again only when the horizon exceeds that one, so that admitting many
    sequences in one step stays cheap.
    """

    def __init__(self, forecast: Forecast, sequences: list[Sequence], tokens_per_step: int, tokens: int) -> None:
        """`tokens`: tokens that each sequence shall be able to generate."""
        self._growth = forecast.growth
        self._sequences = list(sequences)
        self._tokens_per_step = tokens_per_step
        self._tokens = tokens
        contexts = [sequence for sequence in sequences if not sequence.generating]
        self._num_contexts, self._context_tokens = len(contexts), sum(each.num_pending for each in contexts)
        self._recompute_steps = max((each.num_recompute_steps for each in contexts), default=0)
        self._horizon = self._blocks = 0

    def needed(self, newcomer: Sequence) -> int:
        """Blocks for the admitted sequences and this one."""
        for_contexts = max(1, self._tokens_per_step - len(self._sequences) - 1)
        context_steps = (self._context_tokens + newcomer.num_pending) // for_contexts
        recompute_steps = max(self._recompute_steps, newcomer.num_recompute_steps)
        horizon = self._num_contexts + 1 + context_steps + recompute_steps + self._tokens
        if horizon > self._horizon:
            self._horizon = horizon + horizon // 8 if self._horizon else horizon
            self._blocks = sum(self._growth(sequence, self._horizon) for sequence in self._sequences)
        return self._blocks + self._growth(newcomer, self._horizon)

    def add(self, newcomer: Sequence) -> None:
        self._blocks += self._growth(newcomer, self._horizon)
        self._sequences.append(newcomer)
        self._num_contexts += 1
        self._context_tokens += newcomer.num_pending
        self._recompute_steps = max(self._recompute_steps, newcomer.num_recompute_steps)

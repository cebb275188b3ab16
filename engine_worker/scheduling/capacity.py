"""Who may hold memory: the first question of scheduling."""

from collections import abc
from operator import attrgetter
from typing import Protocol

from engine_worker.kvcache.cache import KvCache
from engine_worker.kvcache.forecast import Forecast
from engine_worker.request import Sequence

IN_ORDER = attrgetter("order")


class CapacityScheduler(Protocol):
    """Decides and moves nothing: the blocks are given and taken by whoever asked."""

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(fitting, paused): who shall hold blocks for all its tokens now, in order, and who shall give them back.

        `active` has every sequence that lives and does not await its prompt, in order. Those in neither list wait, or
        keep what they hold without running.
        """
        ...


class MaxUtilization:
    """Fills the pool, and pauses the last in order when blocks run out (MAX_UTILIZATION of TensorRT-LLM).

    A holder is paused only for one before it in order, so the first always runs on. A sequence is admitted only in its
    turn, and only where everybody could then get through the contexts at hand and a block's worth of tokens more:
    whoever was just resumed gets somewhere before it can be paused again.
    """

    def __init__(self, cache: KvCache, max_batch_size: int, max_tokens_per_step: int) -> None:
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._max_tokens_per_step = max_tokens_per_step

    def schedule_request(self, active: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """See CapacityScheduler."""
        forecast = self._cache.forecast()
        fitting, paused = self._keep(forecast)
        if not paused and len(active) > len(fitting):
            self._admit(active, fitting, forecast)
        return fitting, paused

    def _keep(self, forecast: Forecast) -> tuple[list[Sequence], list[Sequence]]:
        keeping, paused, kept = sorted(self._cache.holders, key=IN_ORDER), [], 0
        while kept < len(keeping):
            if forecast.grow(keeping[kept]):
                kept += 1
            else:
                paused.append(keeping.pop())
                forecast.release(paused[-1])
        return keeping, paused

    def _admit(self, active: abc.Sequence[Sequence], fitting: list[Sequence], forecast: Forecast) -> None:
        held = len(fitting)
        for sequence in active:
            if sequence.blocks:
                continue
            if len(fitting) >= self._max_batch_size:
                break
            if not forecast.admit(sequence, self._headroom([*fitting, sequence])):
                break
            fitting.append(sequence)
        if len(fitting) > held:
            fitting.sort(key=IN_ORDER)

    def _headroom(self, sequences: list[Sequence]) -> int:
        """Blocks that these could want before all their contexts and a block's worth of tokens each are computed."""
        contexts = [sequence.num_pending for sequence in sequences if not sequence.generating]
        tokens_for_contexts = max(1, self._max_tokens_per_step - len(sequences))
        steps = len(contexts) + sum(contexts) // tokens_for_contexts + self._cache.tokens_per_block
        blocks_for = self._cache.blocks_for
        return sum(
            blocks_for(min(sequence.num_tokens + steps, sequence.request.max_tokens)) - blocks_for(sequence.num_tokens)
            for sequence in sequences
        )

"""What the engine tells about itself: one frozen snapshot, made anew at every step."""

from collections import deque

import msgspec

from engine_worker.kvcache.cache import KvCache
from engine_worker.live import Live
from engine_worker.request import State
from engine_worker.scheduling.simple import Schedule
from sluice.ring.stats import StepStats

RATE_SECONDS = 1.0


class Rate:
    """Tokens per second over the last RATE_SECONDS, or over the last step where that took longer."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, int]] = deque()
        self._tokens = 0

    def add(self, start: float, end: float, tokens: int) -> None:
        """A step drew so many tokens."""
        self._steps.append((start, end, tokens))
        self._tokens += tokens

    def at(self, now: float) -> float:
        """The rate now; `now` never goes back."""
        while self._steps and self._steps[0][1] <= now - RATE_SECONDS:
            self._tokens -= self._steps.popleft()[2]
        return self._tokens / max(RATE_SECONDS, now - self._steps[0][0]) if self._steps else 0.0


class Stats:
    """`latest` is replaced whole, so another thread may read it at any time.

    A request of n sequences counts once as active, and by its sequences in the numbers after that.
    """

    def __init__(self, cache: KvCache, live: Live, max_requests: int) -> None:
        self._cache = cache
        self._live = live
        self._rate = Rate()
        self.latest = self._memory(
            StepStats(
                max_requests=max_requests,
                max_kv_blocks=cache.pool.num_blocks,
                tokens_per_kv_block=cache.tokens_per_block,
            )
        )

    def stepped(self, schedule: Schedule, num_drawn: int, start: float, end: float) -> None:
        """A step has ended: what it computed, and how many tokens it drew."""
        self._rate.add(start, end, num_drawn)
        context, generation = len(schedule.context), len(schedule.generation)
        self.latest = msgspec.structs.replace(
            self._memory(self.latest),
            iteration=self.latest.iteration + 1,
            scheduled_requests=context + generation,
            context_requests=context,
            generation_requests=generation,
            total_context_tokens=sum(chunk.num_tokens for chunk in schedule.context),
            prefix_cache_hit_ratio=self._cache.hit_ratio,
            tokens_per_second=self._rate.at(end),
        )

    def rested(self, now: float) -> None:
        """There was no step: what can have changed without one."""
        latest = msgspec.structs.replace(self._memory(self.latest), tokens_per_second=self._rate.at(now))
        if latest != self.latest:
            self.latest = latest

    def _memory(self, stats: StepStats) -> StepStats:
        active, held = len(self._live.active), len(self._cache.holders)
        paused = sum(sequence.state is State.PAUSED for sequence in self._live.active) if active > held else 0
        free = self._cache.pool.available
        return msgspec.structs.replace(
            stats,
            active_requests=len(self._live.requests),
            queued_requests=active - held - paused,
            paused_requests=paused,
            free_kv_blocks=free,
            used_kv_blocks=self._cache.pool.num_blocks - free,
        )

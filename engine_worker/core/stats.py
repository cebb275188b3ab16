"""Statistics of each step, and of each request while it is live and when it ends."""

from collections import deque

import msgspec

from engine_worker.core.live import LiveRequests
from engine_worker.hooks import Report
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request, State
from engine_worker.scheduling.simple import RequestScheduler, Schedule
from engine_worker.speculative.drafting import DraftCounts
from sluice.telemetry.measures import Histogram, Rate
from sluice.wire.stats import RequestProgress, Stage, StepStats

REFRESH_SECONDS = 0.5
"""Interval between two reports of a running request."""
REFRESHED_PER_STEP = 4
"""Requests that a step may refresh in any case. Each costs about three microseconds."""
REFRESHED_PER_SECOND = 150
"""Requests that a step may refresh per second of its duration, if that is more."""
CONTEXT_RATE_WEIGHT = 0.2
"""Weight of a new step in `Stats.context_rate`, a moving average."""
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Histogram buckets of step durations."""
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Histogram buckets of sequences per step."""


class Stats:
    """Public attributes may be read in any thread: `latest` is replaced, never modified."""

    def __init__(
        self,
        cache: KvCacheManager,
        live: LiveRequests,
        scheduler: RequestScheduler,
        max_requests: int,
        micro_batches: int,
        unix_zero: float,
    ) -> None:
        """`micro_batches`: steps that are in flight or being planned at the same time. `unix_zero`: Unix time at which
        the engine's clock read 0."""
        self.step_seconds = Histogram(STEP_SECONDS)
        self.step_sequences = Histogram(STEP_SEQUENCES)
        self.context_tokens = 0
        """Tokens computed again after preemption are included."""
        self.generated_tokens = 0
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0
        self._cache = cache
        self._live = live
        self._scheduler = scheduler
        self._micro_batches = micro_batches
        self._unix_zero = unix_zero
        self._rate = Rate()
        self.context_rate = 0.0
        """Prompt tokens per second in recent steps that mostly computed prompts. 0: there was none."""
        self._refresh: deque[Request] = deque()
        """Running requests that are still to be reported in this round, a few per step."""
        self._refresh_at = 0.0
        self._limits = {
            "max_requests": max_requests,
            "max_kv_blocks": cache.pool.num_blocks,
            "tokens_per_kv_block": cache.tokens_per_block,
            "max_host_blocks": cache.tiers.host.num_blocks,
        }
        self.latest = StepStats(**self._limits, **self._memory())

    def record_step(self, schedule: Schedule, num_drawn: int, drafts: DraftCounts, start: float, end: float) -> Report:
        context, generation = len(schedule.context), len(schedule.generation)
        if not (context or generation):
            # It only moved blocks.
            return self.record_idle(end)
        context_tokens = sum(num_tokens for _, num_tokens in schedule.context) if context else 0
        self._rate.add(start, end, num_drawn)
        self.context_tokens += context_tokens
        if context_tokens > generation and end > start:
            rate = context_tokens / (end - start)
            self.context_rate += (rate - self.context_rate) * (CONTEXT_RATE_WEIGHT if self.context_rate else 1.0)
        self.generated_tokens += num_drawn
        self.draft_tokens += drafts.drafted
        self.accepted_draft_tokens += drafts.accepted
        self.step_seconds.observe(end - start)
        self.step_sequences.observe(context + generation)
        batch_tokens, empty_slots = self._scheduler.static_batch
        # A changed copy of `latest` would take twice as long.
        self.latest = StepStats(
            iteration=self.latest.iteration + 1,
            scheduled_requests=context + generation,
            context_requests=context,
            generation_requests=generation,
            total_context_tokens=context_tokens,
            micro_batch_id=self.latest.iteration % self._micro_batches,
            total_generation_tokens=batch_tokens,
            empty_generation_slots=empty_slots,
            prefix_cache_hit_ratio=self._cache.hit_ratio,
            tokens_per_second=self._rate.at(end),
            time=self._unix_zero + end,
            step_seconds=end - start,
            drafting_requests=drafts.sequences,
            draft_tokens=drafts.drafted,
            accepted_draft_tokens=drafts.accepted,
            **self._limits,
            **self._memory(),
        )
        return Report(self.latest, self._requests(start, end))

    def record_idle(self, now: float) -> Report:
        latest = msgspec.structs.replace(
            self.latest,
            scheduled_requests=0,
            context_requests=0,
            generation_requests=0,
            total_context_tokens=0,
            total_generation_tokens=0,
            empty_generation_slots=0,
            drafting_requests=0,
            draft_tokens=0,
            accepted_draft_tokens=0,
            tokens_per_second=self._rate.at(now),
            **self._memory(),
        )
        if latest != self.latest:
            self.latest = latest
        return Report(None, [self._stats_of(request) for request in self._live.take_changed()])

    def _memory(self) -> dict[str, int]:
        cache, host = self._cache, self._cache.tiers.host
        preempted, free = len(cache.preempted), cache.pool.available
        # active_requests counts requests; queued, paused and scheduled ones are sequences.
        return {
            "active_requests": len(self._live.requests),
            "queued_requests": len(self._live.active) - len(cache.holders) - preempted,
            "paused_requests": preempted,
            "free_kv_blocks": free,
            "used_kv_blocks": cache.pool.num_blocks - free,
            "used_host_blocks": host.num_blocks - host.num_free,
        }

    def _requests(self, start: float, end: float) -> list[RequestProgress]:
        """Requests that arrived, were first scheduled or ended, and the next few running ones."""
        changed = self._live.take_changed()
        if not self._refresh and end >= self._refresh_at:
            self._refresh_at = end + REFRESH_SECONDS
            running = (*self._cache.holders, *self._cache.preempted)
            self._refresh = deque(dict.fromkeys(sequence.request for sequence in running))
        if self._refresh:
            # A few per step: reporting all running requests together would delay the step.
            for _ in range(min(len(self._refresh), max(REFRESHED_PER_STEP, int((end - start) * REFRESHED_PER_SECOND)))):
                request = self._refresh.popleft()
                if request.num_live:
                    changed.append(request)
        return [self._stats_of(request) for request in changed]

    def _stats_of(self, request: Request) -> RequestProgress:
        submit, zero = request.submit, self._unix_zero
        sequences = request.sequences
        drafters = [sequence.drafter for sequence in sequences if sequence.drafter is not None]
        firsts = [sequence.first_token_at for sequence in sequences if sequence.first_token_at is not None]
        return RequestProgress(
            request=submit.request,
            name=submit.name,
            stage=stage_of(request),
            arrival=zero + request.arrived_at,
            first_scheduled=None if request.scheduled_at is None else zero + request.scheduled_at,
            first_token=zero + min(firsts) if firsts else None,
            last_token=None if request.last_token_at is None else zero + request.last_token_at,
            prompt_tokens=request.num_prompt,
            cached_tokens=request.cached_tokens,
            generated_tokens=sum(sequence.num_drawn for sequence in sequences),
            pauses=request.preemptions,
            blocks_allocated=request.blocks_allocated,
            blocks_reused=request.blocks_reused,
            blocks_missed=request.blocks_missed,
            draft_tokens=sum(drafter.drafted for drafter in drafters),
            accepted_draft_tokens=sum(drafter.accepted for drafter in drafters),
            first_iteration=request.first_iteration,
            iteration=self.latest.iteration,
        )


def stage_of(request: Request) -> Stage:
    """A request is PAUSED if some of its sequences are preempted and none holds memory."""
    if not request.num_live:
        return Stage.ENDED
    if request.scheduled_at is None:
        return Stage.QUEUED
    states = [sequence.state for sequence in request.sequences]
    if State.PREEMPTED in states and State.RUNNING not in states:
        return Stage.PAUSED
    return Stage.CONTEXT if request.last_token_at is None else Stage.GENERATION

"""What the engines of an executor report: statistics of steps and requests, and KV cache events."""

import asyncio

from sluice.executor.kv_cache_events import KVCacheEvent
from sluice.executor.session import Session
from sluice.executor.stats import ReportedRequest, ReportedStep, read_request, read_step
from sluice.executor.waiting import Deadline, Timeout

POLL_SECONDS = 0.05
"""Interval at which `aget_kv_cache_events` polls for events, which arrive on another event loop."""


class EngineReports:
    """The part of `GenerationExecutor` that reads what its engines report. Thread-safe."""

    _session: Session

    def get_latest_iteration_stats(self, timeout: Timeout = 0.0) -> list[ReportedStep]:
        """Return the steps of all engines since the last call, oldest first.

        Waits up to `timeout` (seconds or a timedelta; None: without limit) for the first step. Engines report twice a
        second, and nothing while idle. Once every step has been read: raises SluiceError if the server does not provide
        statistics (any more), RuntimeError after `shutdown`.
        """
        return [read_step(stats) for stats in self._session.steps.take_steps(timeout)]

    def get_latest_stats(self, timeout: Timeout = 0.0) -> ReportedStep | None:
        """Return the newest step since the last call, and discard those before it; None if there was none.

        Waits and raises like `get_latest_iteration_stats`.
        """
        steps = self.get_latest_iteration_stats(timeout)
        return steps[-1] if steps else None

    def get_latest_request_stats(self, timeout: Timeout = 0.0) -> list[ReportedRequest]:
        """Return the latest statistics of each request that changed since the last call.

        Waits and raises like `get_latest_iteration_stats`.
        """
        requests = self._session.steps.take_requests(timeout)
        return [read_request(stats, self._session.request_id(stats.request_id)) for stats in requests]

    def get_kv_cache_events(self, timeout: Timeout = 0.0) -> list[KVCacheEvent]:
        """Return the KV cache events of all engines since the last call, oldest first.

        Waits up to `timeout` (seconds or a timedelta; None: without limit) for the first event. The first call starts
        at the oldest events in the engines' buffers, whose size is `KvCacheConfig.event_buffer_max_size`. Raises
        SluiceError if the engines keep no events; RuntimeError after `shutdown`, once every event has been read.
        """
        self.follow_kv_cache_events()
        return self._session.cache_events.take(timeout)

    async def aget_kv_cache_events(self, timeout: Timeout = 0.0) -> list[KVCacheEvent]:
        """Like `get_kv_cache_events`, without blocking the event loop."""
        deadline = Deadline(timeout)
        while not (events := self.get_kv_cache_events(0)) and deadline.left != 0:
            await asyncio.sleep(min(POLL_SECONDS, deadline.slice))
        return events

    def follow_kv_cache_events(self) -> None:
        """Start receiving KV cache events, as the first `get_kv_cache_events` does."""
        self._session.follow_cache()

    @property
    def latest_iteration(self) -> int:
        """Number of the newest step that an engine has reported; 0 before the first report."""
        return self._session.steps.latest_iteration

    @property
    def tokens_per_block(self) -> int:
        """Tokens per KV cache block; 1 until an engine has reported a step."""
        return self._session.steps.tokens_per_block

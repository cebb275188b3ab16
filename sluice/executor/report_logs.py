"""Logs of what engines report: they hold what the server's feeds deliver until the caller has read it."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from sluice.client import SluiceError
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.forks import Creator
from sluice.executor.kv_cache_events import KVCacheEvent, read_data
from sluice.executor.waiting import Timeout, wait_for
from sluice.v1 import admin_pb2 as pb

T = TypeVar("T")

CAPACITY = 1 << 14
"""Number of unread events at which receiving pauses; later events stay in the engines' buffers meanwhile."""


class Inbox:
    """Filled by the session's thread from the server; read by any thread.

    Reads return everything that was received before they raise the reason why no more will be.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._error: SluiceError | None = None
        self._closed = False
        self._creator = Creator()

    def fail(self, error: SluiceError) -> None:
        """End the feed: the server does not provide it."""
        with self._lock:
            self._error = error
            self._condition.notify_all()

    def close(self) -> None:
        """End the feed: the executor has been shut down."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: Timeout) -> None:
        """Wait until `ready`, the end of the feed or the timeout. The caller must hold the lock.

        Raises the error that ended the feed, or RuntimeError after `close`, unless `ready`; RuntimeError in a fork.
        """
        self._creator.check()
        wait_for(self._condition, lambda: ready() or self._closed or self._error is not None, timeout)
        if ready():
            return
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError(SHUT_DOWN)

    def _take(self, reports: deque[T], timeout: Timeout) -> list[T]:
        """Wait for reports and take all of them; empty at the timeout. Raises like `_wait`."""
        with self._lock:
            self._wait(lambda: bool(reports), timeout)
            taken = list(reports)
            reports.clear()
            return taken


class StepsLog(Inbox):
    """Keeps the newest `limit` steps, and the latest statistics of the `limit` requests that changed last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.latest_iteration = 0
        self.tokens_per_block = 1
        self._steps: deque[pb.EngineStats] = deque(maxlen=limit)
        self._requests: dict[str, pb.RequestStats] = {}

    def put(self, response: pb.StreamStepsResponse) -> None:
        with self._lock:
            self._steps.extend(response.steps)
            if response.steps:
                self.latest_iteration = response.steps[-1].iteration
                self.tokens_per_block = response.steps[-1].tokens_per_kv_block or 1
            for stats in response.requests:
                # Removed first, so that the dict is in order of change.
                self._requests.pop(stats.request_id, None)
                self._requests[stats.request_id] = stats
            while len(self._requests) > self.limit:
                del self._requests[next(iter(self._requests))]
            self._condition.notify_all()

    def take_steps(self, timeout: Timeout) -> list[pb.EngineStats]:
        """Wait for steps and return all of them, oldest first; empty at the timeout.

        Raises the SluiceError that ended the feed, or RuntimeError after `close`, once all steps have been returned.
        """
        return self._take(self._steps, timeout)

    def take_requests(self, timeout: Timeout) -> list[pb.RequestStats]:
        """Like `take_steps`: the latest statistics of each request, in order of change."""
        with self._lock:
            self._wait(lambda: bool(self._requests), timeout)
            requests, self._requests = list(self._requests.values()), {}
            return requests


class KVCacheEventLog(Inbox):
    """Keeps the events of all engines until they are read, and skips events that it has received before."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        super().__init__()
        self._capacity = capacity
        self._events: deque[KVCacheEvent] = deque()
        self._next: dict[str, tuple[int, int]] = {}
        """(epoch, number of the next event) by engine."""

    @property
    def full(self) -> bool:
        return len(self._events) >= self._capacity

    def put(self, response: pb.StreamCacheEventsResponse) -> None:
        engine, epoch = response.engine_id, response.engine_epoch
        with self._lock:
            known_epoch, next_id = self._next.get(engine, (epoch, 0))
            next_id = next_id if known_epoch == epoch else 0
            for event in response.events:
                # Another router starts again at the engine's oldest events.
                if event.event_id >= next_id:
                    dropped = event.event_id - next_id
                    self._events.append(KVCacheEvent(event.event_id, read_data(event), engine, epoch, dropped))
                    next_id = event.event_id + 1
            self._next[engine] = epoch, next_id
            self._condition.notify_all()

    def take(self, timeout: Timeout) -> list[KVCacheEvent]:
        """Wait for events and return all of them; empty at the timeout.

        Raises the SluiceError that ended the feed, or RuntimeError after `close`, once all events have been returned.
        """
        return self._take(self._events, timeout)

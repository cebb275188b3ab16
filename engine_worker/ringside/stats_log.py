"""The engine's latest statistics, for other threads to read at their own pace."""

from collections import deque
from itertools import islice
from threading import Lock
from typing import NamedTuple, TypeVar

from engine_worker.hooks import Report
from sluice.ring.stats import RequestStats, StepStats

CAPACITY = 4096

T = TypeVar("T")


class Cursor(NamedTuple):
    """A position: the number of steps and of request reports since the start."""

    steps: int
    requests: int


class NewStats(NamedTuple):
    """What was reported after a cursor, oldest first."""

    steps: list[StepStats]
    requests: list[RequestStats]
    """Every report of every request."""
    cursor: Cursor
    lost: Cursor
    """Counts of what was overwritten because the reader was too slow."""

    @property
    def latest_requests(self) -> list[RequestStats]:
        return list({request.request: request for request in self.requests}.values())


class StatsLog:
    """Keeps the latest `capacity` steps, and as many request reports. Written by the engine, read by other threads."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = Lock()
        self._steps: deque[StepStats] = deque(maxlen=capacity)
        self._requests: deque[RequestStats] = deque(maxlen=capacity)
        self._end = Cursor(0, 0)

    def append(self, report: Report) -> None:
        """The engine's `report_stats` hook."""
        with self._lock:
            if report.step is not None:
                self._steps.append(report.step)
            self._requests.extend(report.requests)
            steps, requests = self._end
            self._end = Cursor(steps + (report.step is not None), requests + len(report.requests))

    def cursor(self) -> Cursor:
        """The current end, from which a new reader reads."""
        # Without the lock: the tuple is replaced whole.
        return self._end

    def since(self, cursor: Cursor) -> NewStats:
        with self._lock:
            end = self._end
            new = Cursor(end.steps - cursor.steps, end.requests - cursor.requests)
            steps, requests = _last(self._steps, new.steps), _last(self._requests, new.requests)
        lost = Cursor(new.steps - len(steps), new.requests - len(requests))
        return NewStats(steps, requests, end, lost)


def _last(items: deque[T], count: int) -> list[T]:
    return list(islice(items, max(0, len(items) - count), None))

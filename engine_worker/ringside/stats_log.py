"""The latest reports of the engine, for other threads to read at their own pace."""

from collections import deque
from itertools import islice
from threading import Lock
from typing import NamedTuple, TypeVar

from engine_worker.hooks import Report
from sluice.ring.stats import RequestStats, StepStats

CAPACITY = 4096

T = TypeVar("T")


class Cursor(NamedTuple):
    """So many steps and so many reports of requests; since the start, it is how far somebody has read."""

    steps: int
    requests: int


class News(NamedTuple):
    """What came after a cursor, oldest first."""

    steps: list[StepStats]
    requests: list[RequestStats]
    """Every report of every request."""
    cursor: Cursor
    lost: Cursor
    """What is gone already: the reader was too slow."""

    @property
    def latest_requests(self) -> list[RequestStats]:
        """Of each request only the latest report."""
        return list({request.request: request for request in self.requests}.values())


class StatsLog:
    """The engine writes, others read. Of steps, and of reports of requests, the latest `capacity` are kept."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = Lock()
        self._steps: deque[StepStats] = deque(maxlen=capacity)
        self._requests: deque[RequestStats] = deque(maxlen=capacity)
        self._written = Cursor(0, 0)

    def put(self, report: Report) -> None:
        """The engine's hook."""
        with self._lock:
            if report.step is not None:
                self._steps.append(report.step)
            self._requests.extend(report.requests)
            steps, requests = self._written
            self._written = Cursor(steps + (report.step is not None), requests + len(report.requests))

    def now(self) -> Cursor:
        """Where whoever begins to read begins."""
        return self._written

    def since(self, cursor: Cursor) -> News:
        """What came after `cursor`."""
        with self._lock:
            written = self._written
            new = Cursor(written.steps - cursor.steps, written.requests - cursor.requests)
            steps, requests = _last(self._steps, new.steps), _last(self._requests, new.requests)
        lost = Cursor(new.steps - len(steps), new.requests - len(requests))
        return News(steps, requests, written, lost)


def _last(items: deque[T], count: int) -> list[T]:
    return list(islice(items, max(0, len(items) - count), None))

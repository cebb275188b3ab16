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
    """How far somebody has read: steps and reports of requests since the start."""

    steps: int
    requests: int


class News(NamedTuple):
    """What came after a cursor, oldest first; of a request only the latest."""

    steps: list[StepStats]
    requests: list[RequestStats]
    cursor: Cursor
    lost: int
    """Steps that are gone already: the reader was too slow."""


class Reports:
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
            steps = _last(self._steps, written.steps - cursor.steps)
            requests = _last(self._requests, written.requests - cursor.requests)
        latest = {request.request: request for request in requests}
        return News(steps, list(latest.values()), written, written.steps - cursor.steps - len(steps))


def _last(items: deque[T], count: int) -> list[T]:
    return list(islice(items, max(0, len(items) - count), None))

"""The engine's latest statistics, for other threads to read at their own pace; one passes them to a user's function."""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple, TypeVar

from structlog.stdlib import BoundLogger

from engine_worker.hooks import Report
from sluice.ring.names import find
from sluice.ring.stats import RequestStats, StatsSource, StepStats, request_json, step_json

CAPACITY = 4096
POLL_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""Time that the user's function has at the end for the remaining statistics."""

T = TypeVar("T")
Function = Callable[[str], object]


class Cursor(NamedTuple):
    """A position in the log: the numbers of steps and request reports before it, since the start."""

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
    """Keeps the latest `capacity` steps, and as many request reports."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = threading.Lock()
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
        """The current end."""
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


def find_function(value: str) -> Function:
    """The function that `module:function` names. Raises ValueError."""
    try:
        found: Function = find(value)
    except ValueError as error:
        raise ValueError(f"stats_callback: {value!r} cannot be used: {error}") from error
    if not callable(found):
        raise ValueError(f"stats_callback: {value!r} cannot be called")
    return found


class StatsCallback(threading.Thread):
    """Calls `function`, which no step waits for, with a JSON object per step and per request report, in order."""

    def __init__(
        self,
        function: Function,
        source: StatsSource,
        draining: Callable[[], bool],
        stats_log: StatsLog,
        log: BoundLogger,
    ) -> None:
        super().__init__(name="stats_callback", daemon=True)
        self.errors = 0
        """Exceptions of the function."""
        self.lost_steps = self.lost_requests = 0
        """Overwritten in the log before a function that is too slow got them."""
        self._function = function
        self._source = source
        self._draining = draining
        self._stats_log = stats_log
        self._log = log
        self._cursor = stats_log.cursor()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self._deliver()
        self._deliver()

    def stop(self) -> None:
        """Deliver the rest and join the thread; a function that does not return is abandoned."""
        self._stopped.set()
        self.join(LINGER_SECONDS)

    def _deliver(self) -> None:
        new = self._stats_log.since(self._cursor)
        self._cursor = new.cursor
        self.lost_steps += new.lost.steps
        self.lost_requests += new.lost.requests
        for step in new.steps:
            self._call(step_json(step, self._source, self._draining()))
        for request in new.requests:
            self._call(request_json(request, self._source.engine_id, time.time()))

    def _call(self, text: str) -> None:
        try:
            self._function(text)
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and the engine must go on
            self.errors += 1
            # Only the first: a function that always raises would otherwise fill the log.
            if self.errors == 1:
                self._log.exception("stats_callback_failed")

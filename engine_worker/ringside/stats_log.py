"""A log of the engine's latest statistics that other threads read at their own pace, and the thread that passes them to
a user's function."""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple, TypeVar

from structlog.stdlib import BoundLogger

from engine_worker.hooks import Report
from sluice.wire.stats import RequestProgress, StatsSource, StepStats, request_json, step_json

CAPACITY = 4096
"""Steps, and request reports, that the log keeps."""
POLL_SECONDS = 0.1
"""Interval at which the user's function receives new statistics."""
LINGER_SECONDS = 1.0
"""How long `StatsCallback.stop` waits for the user's function to process the remaining statistics."""

T = TypeVar("T")
Function = Callable[[str], object]


class Cursor(NamedTuple):
    """A position in the log: how many steps and request reports precede it since the start."""

    steps: int
    requests: int


class NewStats(NamedTuple):
    """Statistics reported after a cursor, oldest first."""

    steps: list[StepStats]
    requests: list[RequestProgress]
    """Every report of every request."""
    cursor: Cursor
    """The end of these statistics, for the next call of `since`."""
    lost: Cursor
    """Numbers of steps and request reports that were overwritten before the reader got to them."""

    @property
    def latest_requests(self) -> list[RequestProgress]:
        """The latest report of each request."""
        return list({request.request: request for request in self.requests}.values())


class StatsLog:
    """Keeps the latest `capacity` steps, and as many request reports."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = threading.Lock()
        self._steps: deque[StepStats] = deque(maxlen=capacity)
        self._requests: deque[RequestProgress] = deque(maxlen=capacity)
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
        """The end of the log."""
        # Needs no lock: `_end` is replaced as a whole.
        return self._end

    def since(self, cursor: Cursor) -> NewStats:
        """The statistics after a cursor."""
        with self._lock:
            end = self._end
            new = Cursor(end.steps - cursor.steps, end.requests - cursor.requests)
            steps, requests = _last(self._steps, new.steps), _last(self._requests, new.requests)
        lost = Cursor(new.steps - len(steps), new.requests - len(requests))
        return NewStats(steps, requests, end, lost)


def _last(items: deque[T], count: int) -> list[T]:
    return list(islice(items, max(0, len(items) - count), None))


class StatsCallback(threading.Thread):
    """Calls `function` with a JSON object per step and per request report, in order. No step waits for it."""

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
        """Number of exceptions that the function has raised."""
        self.lost_steps = self.lost_requests = 0
        """Numbers of steps and request reports that were overwritten because the function was too slow."""
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
        """Deliver the remaining statistics and join the thread. Returns after LINGER_SECONDS even if the function is
        still running."""
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
        # Also SystemExit, which would end this thread without a message.
        except BaseException:  # noqa: BLE001 - the user's code may raise anything, and the engine must not stop
            self.errors += 1
            # Log the first exception only: a function that always raises would fill the log.
            if self.errors == 1:
                self._log.exception("stats_callback_failed")

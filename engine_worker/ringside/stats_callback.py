"""Statistics as JSON, to a function of the user's. It runs in a thread of its own: no step waits for it."""

import threading
import time
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from engine_worker.ringside.stats_log import StatsLog
from sluice.ring.names import find
from sluice.ring.stats import request_json, step_json

POLL_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""What the function gets at the end for what it has not been told."""

Function = Callable[[str], object]


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
    """Calls `function` with one JSON object for each step and for each report of a request, in order.

    One that is too slow misses the oldest, which `lost_steps` and `lost_requests` count. `errors` counts its
    exceptions, of which the first is logged.
    """

    def __init__(
        self,
        function: Function,
        engine: str,
        model: str,
        draining: Callable[[], bool],
        reports: StatsLog,
        log: BoundLogger,
    ) -> None:
        """`model`: its fingerprint."""
        super().__init__(name="stats_callback", daemon=True)
        self.errors = 0
        self.lost_steps = 0
        self.lost_requests = 0
        self._function = function
        self._engine = engine
        self._model = model
        self._draining = draining
        self._reports = reports
        self._log = log
        self._read = reports.now()
        self._stopped = threading.Event()

    def run(self) -> None:
        """The thread."""
        while not self._stopped.wait(POLL_SECONDS):
            self._tell()
        self._tell()

    def stop(self) -> None:
        """Tell what is left, and end; a function that does not return is left behind."""
        self._stopped.set()
        self.join(LINGER_SECONDS)

    def _tell(self) -> None:
        news = self._reports.since(self._read)
        self._read = news.cursor
        self.lost_steps += news.lost.steps
        self.lost_requests += news.lost.requests
        for step in news.steps:
            self._call(step_json(step, self._engine, self._model, self._draining()))
        for request in news.requests:
            self._call(request_json(request, self._engine, time.time()))

    def _call(self, text: str) -> None:
        try:
            self._function(text)
        except Exception:  # noqa: BLE001 - it is the user's code: whatever it raises, the engine goes on
            self.errors += 1
            if self.errors == 1:
                self._log.exception("stats_callback_failed")

"""Passes statistics as JSON to a user's function, in a thread of its own so that no step waits for it."""

import threading
import time
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from engine_worker.ringside.stats_log import StatsLog
from sluice.ring.names import find
from sluice.ring.stats import request_json, step_json

POLL_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""Time that the function has at the end for the remaining statistics."""

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
    """Calls `function` with one JSON object for each step and for each request report, in order.

    A function that is too slow misses the oldest, counted in `lost_steps` and `lost_requests`. `errors` counts its
    exceptions; the first is logged.
    """

    def __init__(
        self,
        function: Function,
        engine: str,
        model: str,
        draining: Callable[[], bool],
        stats_log: StatsLog,
        log: BoundLogger,
    ) -> None:
        """`model`: the fingerprint."""
        super().__init__(name="stats_callback", daemon=True)
        self.errors = 0
        self.lost_steps = 0
        self.lost_requests = 0
        self._function = function
        self._engine = engine
        self._model = model
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
            self._call(step_json(step, self._engine, self._model, self._draining()))
        for request in new.requests:
            self._call(request_json(request, self._engine, time.time()))

    def _call(self, text: str) -> None:
        try:
            self._function(text)
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and the engine must go on
            self.errors += 1
            if self.errors == 1:
                self._log.exception("stats_callback_failed")

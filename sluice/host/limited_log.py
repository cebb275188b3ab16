"""A log of events that a peer can cause any number of times."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from structlog.stdlib import BoundLogger

INTERVAL_SECONDS = 10.0
MAX_LINES = 10
"""Lines per event and interval."""


class LimitedLog:
    """Writes at most MAX_LINES lines per event and interval. The next line then has `suppressed`, the number of events
    without one. Not thread-safe. Names of events must be constants."""

    def __init__(self, log: BoundLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._began: dict[str, float] = {}
        """Start of the current interval, by event."""
        self._lines: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    def info(self, event: str, **fields: Any) -> None:
        self._write(self._log.info, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(self._log.warning, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        self._write(self._log.exception, event, fields)

    def _write(self, write: Callable[..., Any], event: str, fields: dict[str, Any]) -> None:
        now = self._clock()
        if now - self._began.setdefault(event, now) >= INTERVAL_SECONDS:
            self._began[event], self._lines[event] = now, 0
        self._lines[event] += 1
        if self._lines[event] > MAX_LINES:
            self._suppressed[event] += 1
        elif suppressed := self._suppressed.pop(event, 0):
            write(event, **fields, suppressed=suppressed)
        else:
            write(event, **fields)

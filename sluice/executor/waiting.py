"""Timeouts as numbers or timedeltas, and waits that end at a deadline and that signals can interrupt."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

Timeout = timedelta | float | None
"""A number is in seconds; None: no timeout."""

Milliseconds = timedelta | float
"""A number is in milliseconds, as in TensorRT-LLM."""

SLICE_SECONDS = 0.25
"""Longest single wait. Longer waits are split, because a signal that arrives just before an endless wait would not
interrupt it."""


class Deadline:
    """The point in time at which a timeout, which starts now, expires."""

    def __init__(self, timeout: Timeout) -> None:
        seconds = in_seconds(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, at least 0; None: no deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def slice(self) -> float:
        """Duration of the next wait, in seconds."""
        left = self.left
        return SLICE_SECONDS if left is None else min(SLICE_SECONDS, left)


def wait_for(condition: threading.Condition, predicate: Callable[[], bool], timeout: Timeout) -> bool:
    """Wait until the predicate is true; False at the timeout. The caller must hold the condition's lock."""
    # Callers lock the plain `threading.Lock`: `with condition` runs Python code, in which Ctrl-C could leave it locked.
    deadline = Deadline(timeout)
    while not predicate():
        if deadline.left == 0:
            return False
        condition.wait(deadline.slice)
    return True


def in_seconds(value: Timeout) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else value


def as_timedelta(value: Milliseconds | None) -> timedelta | None:
    return value if value is None or isinstance(value, timedelta) else timedelta(milliseconds=value)

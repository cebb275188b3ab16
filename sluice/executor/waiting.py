"""Timeouts as callers give them, and waits that a deadline or a signal ends."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

Timeout = timedelta | float | None
"""A number is seconds; None: no timeout."""

Milliseconds = timedelta | float
"""A number is milliseconds, as in TensorRT-LLM."""

# Waits are cut into slices: a signal that arrives just before an endless wait would not interrupt it.
SLICE_SECONDS = 0.25


class Deadline:
    """The end of a timeout that starts now."""

    def __init__(self, timeout: Timeout) -> None:
        seconds = in_seconds(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, at least 0; None: no deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def slice(self) -> float:
        """Seconds of the next wait."""
        left = self.left
        return SLICE_SECONDS if left is None else min(SLICE_SECONDS, left)


def wait_for(condition: threading.Condition, predicate: Callable[[], bool], timeout: Timeout) -> bool:
    """Wait until the predicate holds; False at the timeout. The caller holds the condition's lock."""
    # By `with` on the plain `threading.Lock` itself: `with condition` runs Python code, in which Ctrl-C can leave the
    # lock locked.
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

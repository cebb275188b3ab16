"""Waiting that a deadline or a signal ends."""

import threading
import time
from collections.abc import Callable

from sluice.executor.times import Timeout, in_seconds

SLICE_SECONDS = 0.25
"""Waits are cut into these: a signal that comes just before an endless wait would not end it."""


class Deadline:
    """A moment so long from now; None: never."""

    def __init__(self, timeout: Timeout) -> None:
        seconds = in_seconds(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until then, at least 0; None: no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def slice(self) -> float:
        """Seconds of the next wait on the way there."""
        return SLICE_SECONDS if self._end is None else min(SLICE_SECONDS, max(0.0, self._end - time.monotonic()))


def wait_for(condition: threading.Condition, holds: Callable[[], bool], timeout: Timeout) -> bool:
    """Whether it holds, after waiting for it.

    The condition's lock must be held, by `with` on a plain `threading.Lock` itself: Ctrl-C on the way into or out of
    `with condition`, which runs Python code, can leave its lock locked.
    """
    deadline = Deadline(timeout)
    while not holds():
        if deadline.left == 0:
            return False
        condition.wait(deadline.slice)
    return True

"""What the logs of an executor's reports have in common: how their feed ends."""

import threading
from collections.abc import Callable

from sluice.client import SluiceError
from sluice.executor.errors import SHUT_DOWN
from sluice.executor.forks import Creator
from sluice.executor.waiting import Timeout, wait_for


class ReportLog:
    """Written by the session's thread, which follows a feed of the server; read by any thread.

    Reads return everything that the feed sent before they raise the reason for its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._error: SluiceError | None = None
        self._closed = False
        self._creator = Creator()

    def fail(self, error: SluiceError) -> None:
        """End the feed: the server does not provide it."""
        with self._lock:
            self._error = error
            self._condition.notify_all()

    def close(self) -> None:
        """End the feed: the executor has been shut down."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: Timeout) -> None:
        """Wait until `ready`, the end of the feed or the timeout. The caller must hold the lock.

        Raises the error that ended the feed, or RuntimeError after `close`, unless `ready`; RuntimeError in a fork.
        """
        self._creator.check()
        wait_for(self._condition, lambda: ready() or self._closed or self._error is not None, timeout)
        if ready():
            return
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError(SHUT_DOWN)

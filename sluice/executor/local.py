"""A ring on this machine, for as long as its executor lives."""

import atexit
import logging
import os
import threading
from typing import Any

from sluice.executor.waiting import SLICE_SECONDS
from sluice.launch import LogLine, Ring

LOGGER = logging.getLogger("sluice.executor")


class LocalRing:
    """A started ring. A thread of its own starts and keeps it: children die with the thread that made them, and the
    caller's may end before.

    Arguments and errors are those of `Ring`. What its services log as warnings and worse goes to `logging`.
    """

    def __init__(self, model: str | None, **options: Any) -> None:
        self._ring = Ring(model, observe=_log_problem, **options)
        self._stop = threading.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._keep, name="sluice ring", daemon=True)
        # Whatever interrupts its owner, and wherever.
        atexit.register(self.close)
        self._thread.start()
        try:
            while not self._started.wait(SLICE_SECONDS):
                pass
        except BaseException:
            self._kill()
            raise
        if self._error is not None:
            atexit.unregister(self.close)
            raise self._error

    @property
    def addresses(self) -> list[str]:
        """Of its routers."""
        return self._ring.addresses

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service."""
        return self._ring.pids

    def close(self) -> None:
        """End all processes and remove their sockets, at once if interrupted meanwhile. Idempotent."""
        if os.getpid() != self._owner:
            # A fork of the process that started it has no say.
            return
        self._stop.set()
        try:
            while self._thread.is_alive():
                self._thread.join(SLICE_SECONDS)
        except BaseException:
            self._kill()
            raise
        atexit.unregister(self.close)

    def _kill(self) -> None:
        self._stop.set()
        self._ring.kill()
        self._thread.join()

    def _keep(self) -> None:
        try:
            with self._ring:
                self._started.set()
                self._stop.wait()
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._started.set()


def _log_problem(line: LogLine) -> None:
    if line.is_problem:
        LOGGER.warning("%s: %s", line.child, line.text)

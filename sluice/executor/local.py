"""A ring on this machine that lives as long as its executor."""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from sluice.executor.waiting import SLICE_SECONDS
from sluice.launch import LogLine, Ring

log = logging.getLogger("sluice.executor")


class LocalRing:
    """A running `Ring`, with the same arguments and exceptions. Warnings and errors of its services go to `logging`."""

    def __init__(self, model: str | None, **options: Any) -> None:
        self.at_exit: Callable[[], None] = lambda: None
        """Called before the ring is closed at the end of the program. It must end the requests on the ring, or the
        routers drain until their timeout. A finalizer of the executor could run too late for that."""
        self._ring = Ring(model, observe=_log_problem, **options)
        self._stop = threading.Event()
        self._started = threading.Event()
        # Not `Thread.join`: until Python 3.13, an interrupt during it marks a running thread as ended (gh-90882).
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._owner = os.getpid()
        # Child processes die with the thread that started them, and the caller's thread may end before the executor.
        thread = threading.Thread(target=self._run, name="sluice ring", daemon=True)
        # Registered before the thread starts, so that an interrupt at any point leaves no ring behind.
        atexit.register(self._close_at_exit)
        try:
            thread.start()
        except RuntimeError:
            # The system refused another thread.
            self._ended.set()
            raise
        try:
            while not self._started.wait(SLICE_SECONDS):
                pass
        except BaseException:
            self._kill()
            raise
        if self._error is not None:
            atexit.unregister(self._close_at_exit)
            raise self._error

    @property
    def addresses(self) -> list[str]:
        return self._ring.addresses

    @property
    def pids(self) -> dict[str, int]:
        return self._ring.pids

    def close(self) -> None:
        """Stop all processes. An interrupt (Ctrl-C) kills them immediately. Idempotent."""
        if os.getpid() != self._owner:
            # The ring belongs to the process that started it, not to a fork of that process.
            return
        try:
            self._stop.set()
            while not self._ended.wait(SLICE_SECONDS):
                pass
        except BaseException:
            self._kill()
            raise
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if os.getpid() == self._owner:
            try:
                self.at_exit()
            finally:
                self.close()

    def _kill(self) -> None:
        self._stop.set()
        self._ring.kill()
        self._ended.wait()

    def _run(self) -> None:
        try:
            with self._ring:
                self._started.set()
                self._stop.wait()
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._started.set()
            self._ended.set()


def _log_problem(line: LogLine) -> None:
    if line.is_problem:
        log.warning("%s: %s", line.child, line.text)

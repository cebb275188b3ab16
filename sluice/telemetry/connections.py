"""The connections of a small server with a thread for each: so many at a time, each for so long."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

END_SECONDS = 1.0
"""For the thread of a connection that was closed to notice."""


class Connections:
    """Oldest first. Any thread may call."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._free = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}

    def add(self, connection: socket.socket) -> bool:
        """A new one, for which the oldest may have to go. False where even then there is no room."""
        if not self._free.acquire(blocking=False):
            self.close_oldest()
            if not self._free.acquire(timeout=END_SECONDS):
                return False
        with self._lock:
            self._since[connection] = self._clock()
        return True

    def remove(self, connection: socket.socket) -> None:
        """Its thread is done with it."""
        with self._lock:
            self._since.pop(connection, None)
        self._free.release()

    def close_oldest(self) -> None:
        """If there is one."""
        with self._lock:
            oldest = next(iter(self._since), None)
        if oldest is not None:
            self._close(oldest)

    def close_late(self) -> None:
        """Those that have had their time."""
        now = self._clock()
        with self._lock:
            late = [connection for connection, since in self._since.items() if now - since >= self._seconds]
        for connection in late:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        """Its thread, which waits for it, sees its end."""
        with self._lock:
            self._since.pop(connection, None)
        with suppress(OSError):  # it may have ended by itself
            connection.shutdown(socket.SHUT_RDWR)

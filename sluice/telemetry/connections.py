"""The open connections of a service's status server."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

END_SECONDS = 1.0
"""Time that the thread of a closed connection has to end."""


class Connections:
    """Open connections, each with a thread; limited in number and time. Thread-safe."""

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: number of connections. seconds: time limit of a request, including the wait for it."""
        self._seconds = seconds
        self._clock = clock
        self._free = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        """When each connection was opened or answered last, in this order."""

    def add(self, connection: socket.socket) -> bool:
        """Add a connection; at the limit, close the oldest one first. False if that one's thread does not end in
        time."""
        if not self._free.acquire(blocking=False):
            self.close_oldest()
            if not self._free.acquire(timeout=END_SECONDS):
                return False
        with self._lock:
            self._since[connection] = self._clock()
        return True

    def renew(self, connection: socket.socket) -> None:
        """Called by the thread of the connection when it has answered a request."""
        with self._lock:
            if self._since.pop(connection, None) is not None:
                self._since[connection] = self._clock()

    def remove(self, connection: socket.socket) -> None:
        """Called by the thread of the connection when it ends."""
        with self._lock:
            self._since.pop(connection, None)
        self._free.release()

    def close_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._since), None)
        if oldest is not None:
            self._close(oldest)

    def close_late(self) -> None:
        now = self._clock()
        with self._lock:
            late = [connection for connection, since in self._since.items() if now - since >= self._seconds]
        for connection in late:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        with self._lock:
            self._since.pop(connection, None)
        # Shut down, not close: that ends the blocking read of the connection's thread. If the client has closed the
        # connection, it raises OSError.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

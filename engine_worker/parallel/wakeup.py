"""Wakes the process at the other end of a socket pair, and tells when it has gone."""

import select
import socket
import time

SLICE_SECONDS = 0.5
"""A wait counts no more than this per look at the clock: time in which this process itself stood still is not the
other's."""
DRAINED = 4096


class Bell:
    """One end. A ring that nobody has heard yet is enough: more of them are one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)

    def ring(self) -> bool:
        """False where the other end has gone."""
        try:
            self._socket.send(b"\0")
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Until it rings; False where it did not in so many seconds. Raises EOFError where the other end has gone."""
        while seconds > 0:
            before = time.monotonic()
            if select.select([self._socket], [], [], min(seconds, SLICE_SECONDS))[0]:
                return self._drain()
            seconds -= min(time.monotonic() - before, SLICE_SECONDS)
        return False

    def gone(self) -> bool:
        """Whether the other end has. Hears, and forgets, what rang."""
        try:
            return bool(select.select([self._socket], [], [], 0)[0]) and not self._drain()
        except EOFError:
            return True

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _drain(self) -> bool:
        try:
            if not self._socket.recv(DRAINED):
                raise EOFError
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError from error
        return True

"""A peer that sends whatever bytes it is given, and what a run is judged by."""

import os
import time
from pathlib import Path

import zmq

PATIENCE = 120.0
"""Seconds for what must happen."""


class Sender:
    """Raw frames into an inbox."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    def offer(self, frame: bytes) -> bool:
        """False where the inbox has no room now."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Deadline:
    """Raises where nothing goes on any more."""

    def __init__(self) -> None:
        self._end = time.monotonic() + PATIENCE

    def check(self) -> None:
        assert time.monotonic() < self._end, "nothing goes on any more"

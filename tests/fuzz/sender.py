"""A peer that floods an inbox with raw frames, and helpers for such runs."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from tests.fuzz.frames import Mutator

PATIENCE_SECONDS = 120.0
"""Seconds that a service may make no progress, generous enough for a busy machine."""

TICK_EVERY = 64
"""Number of frames between two calls of `Tick`."""

Tick = Callable[[int], None]
"""Called with the number of frames sent so far."""


class Sender:
    """Sends raw frames to an inbox."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    def offer(self, frame: bytes) -> bool:
        """Send a frame. Returns False if the lane is full at the moment."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class Deadline:
    """Fails a run that makes no progress."""

    def __init__(self) -> None:
        self._end = 0.0
        self.renew()

    def renew(self) -> None:
        """To be called after each sign of progress."""
        self._end = time.monotonic() + PATIENCE_SECONDS

    def check(self) -> None:
        assert time.monotonic() < self._end, f"no progress in {PATIENCE_SECONDS} s"


def flood(
    frames: int, mutator: Mutator, sender: Sender, deadline: Deadline, turn: Callable[[], None], tick: Tick
) -> None:
    """Send `frames` mutated frames as fast as they are accepted. `turn` lets the service work."""
    for sent in range(1, frames + 1):
        frame = mutator.frame()
        while not sender.offer(frame):
            turn()
        if not sent % TICK_EVERY:
            turn()
            deadline.renew()
            tick(sent)


def resident_mib() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

"""The order of answers: that of each engine's questions, although some are answered by a slow disk."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

from sluice.wire.message import Message

MAX_WAITING: Final = 4
"""Answers of an engine that wait for one from the disk. An engine asks less."""
MAX_IN_ALL: Final = 16
"""Answers of all engines that wait. If a disk hangs, engines come back again and again, each time with another
identity."""


class Reply(NamedTuple):
    kind: str
    """Its name in the metrics."""
    message: Message
    data: Sequence[memoryview] = ()
    """Frames after the message, one for each block."""
    from_disk: int = 0
    """How many of the blocks were there."""


class Turns:
    """Not thread-safe."""

    def __init__(self, send: Callable[[bytes, Reply], None]) -> None:
        """`send`: called with an engine's identity and the answer whose turn it is."""
        self._send = send
        self._waiting: dict[bytes, deque[Future[Reply]]] = {}
        """Of each engine that waits for the disk."""
        self.ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """A descriptor that is readable once an answer has come from the disk."""

    def __bool__(self) -> bool:
        """Whether answers wait."""
        return bool(self._waiting)

    def is_full(self, peer: bytes) -> bool:
        """Whether no question of this engine can be accepted."""
        return len(self._waiting.get(peer, ())) >= MAX_WAITING

    @property
    def disk_is_full(self) -> bool:
        """Whether the disk must not be asked."""
        return sum(map(len, self._waiting.values())) >= MAX_IN_ALL

    def add(self, peer: bytes, reply: "Reply | Future[Reply]") -> None:
        """Send an answer when it is its turn."""
        if isinstance(reply, Reply):
            if peer not in self._waiting:
                self._send(peer, reply)
                return
            known, reply = reply, Future()
            reply.set_result(known)
        else:
            reply.add_done_callback(lambda _: os.eventfd_write(self.ended, 1))
        self._waiting.setdefault(peer, deque()).append(reply)

    def take_ended(self) -> None:
        """Send what the disk has answered, and what has waited for it."""
        try:
            os.eventfd_read(self.ended)
        except BlockingIOError:
            return
        for peer, replies in list(self._waiting.items()):
            while replies and replies[0].done():
                self._send(peer, replies.popleft().result())
            if not replies:
                del self._waiting[peer]

    def close(self) -> None:
        os.close(self.ended)

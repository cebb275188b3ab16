"""A lane in memory, and helpers to wait for real ones."""

import time
from collections.abc import Callable, Iterator

from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import DetokenizerHeartbeat
from sluice.wire.message import Message
from sluice.wire.rows import TextBatch, TextRow

WAIT_SECONDS = 60.0


def until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Poll until the condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in {seconds} s"
        time.sleep(0.001)


def connected(lane: Lane) -> Lane:
    """Wait until the lane accepts messages, then return it."""
    until(lane.ready)
    return lane


class FakeLane:
    """Accepts `room` messages, then is full."""

    open = True

    def __init__(self, room: int = 1 << 60) -> None:
        self.room = room
        self.refused = 0
        self.closed = False
        self.refused_at: float | None = None
        self.messages: list[Message] = []

    def ready(self) -> bool:
        return self.room > 0

    def hung_up(self) -> bool:
        return self.refused_at is not None

    def send(self, message: Message) -> bool:
        if not self.room:
            self.refused += 1
            return False
        self.room -= 1
        self.messages.append(message)
        return True

    def close(self, linger: float = 0.0) -> None:
        self.closed = True

    @property
    def batches(self) -> list[TextBatch]:
        return [message for message in self.messages if isinstance(message, TextBatch)]

    @property
    def heartbeats(self) -> list[DetokenizerHeartbeat]:
        return [message for message in self.messages if isinstance(message, DetokenizerHeartbeat)]

    def rows(self) -> Iterator[TextRow]:
        for batch in self.batches:
            yield from batch.rows()

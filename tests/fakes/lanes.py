"""Lanes in memory."""

from collections.abc import Iterator

from sluice.ring.beats import DetokenizerBeat
from sluice.ring.message import Message
from sluice.ring.wire import TextBatch, TextRow


class FakeLane:
    """Takes messages until `room` is used up."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.room = room
        self.refused = 0
        self.closed = False
        self.messages: list[Message] = []

    def ready(self) -> bool:
        return self.room > 0

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
    def beats(self) -> list[DetokenizerBeat]:
        return [message for message in self.messages if isinstance(message, DetokenizerBeat)]

    def rows(self) -> Iterator[TextRow]:
        for batch in self.batches:
            yield from batch.rows()

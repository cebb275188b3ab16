"""Rank 0's end of a command channel to ranks that do as the test says."""

from engine_worker.parallel.channel import ChannelError
from engine_worker.parallel.commands import Command, decode


class CommandSender:
    """Keeps what was sent."""

    def __init__(self, size: int) -> None:
        self.commands: list[Command] = []
        self.through = dict.fromkeys(range(1, size), 0)
        self.keeps_up = False
        """Whether all are through with whatever comes."""
        self.left: set[int] = set()
        self.busy = False
        self.broken = False
        self.closed = False

    @property
    def sent(self) -> int:
        return len(self.commands)

    def send(self, message: bytes) -> int:
        if self.broken:
            raise ChannelError("rank 2 has read nothing")
        self.commands.append(decode(bytearray(message)))
        return self.sent

    def idle(self) -> bool:
        return not self.busy

    def completed(self, rank: int) -> int:
        return self.sent if self.keeps_up else self.through[rank]

    def disconnected(self, rank: int) -> bool:
        return rank in self.left

    def close(self) -> None:
        self.closed = True

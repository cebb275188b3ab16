"""Rank 0's end of a command channel whose other ranks a test plays."""

from engine_worker.parallel.channel import ChannelError
from engine_worker.parallel.commands import Command, decode


class CommandSender:
    """Stores the commands that were sent. A test sets the attributes to what the other ranks have done."""

    def __init__(self, size: int) -> None:
        self.commands: list[Command] = []
        self.through = dict.fromkeys(range(1, size), 0)
        """Number of commands that each rank has completed."""
        self.keeps_up = False
        """Whether every rank has completed every command, regardless of `through`."""
        self.disconnected_ranks: set[int] = set()
        self.busy = False
        self.broken = False
        """Whether `send` raises."""
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
        return rank in self.disconnected_ranks

    def close(self) -> None:
        self.closed = True

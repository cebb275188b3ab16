"""How commands go from rank 0 to the other ranks of its group: in order, each of them to every rank."""

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

Part = bytes | bytearray | memoryview
Count = int
LOST = 1
"""Exit status of a rank whose group is lost."""
HEADER = struct.Struct("!QQ")
"""Of a command: its number, from 1, and its size in bytes."""


class ChannelError(RuntimeError):
    """A rank cannot be reached any more, or what came of it is no command. The group is lost."""


class GoneError(ChannelError):
    """This rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has gone")
        self.rank = rank


class Sender(Protocol):
    """Rank 0's end. Several threads may send; one asks for the rest. Ranks are counted from 1."""

    @property
    def sent(self) -> Count:
        """Commands sent so far."""
        ...

    def send(self, parts: Sequence[Part]) -> None:
        """One command, in pieces. Raises ChannelError where a rank has gone or makes no room in time: what was sent
        then means nothing."""
        ...

    def idle(self) -> bool:
        """Whether nobody is sending just now."""
        ...

    def done(self, rank: int) -> Count:
        """Commands that this rank is through with."""
        ...

    def gone(self, rank: int) -> bool:
        """Whether it has closed its end, or died."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Receiver(Protocol):
    """A follower's end; for one thread."""

    def receive(self, seconds: float) -> bytearray:
        """The next command. Raises ChannelError where rank 0 has gone, or has sent nothing for so long."""
        ...

    def fileno(self) -> int:
        """Of the socket that hangs up when rank 0 has gone."""
        ...

    def finish(self) -> None:
        """This rank is through with the command that came last."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def take_command(due: Count, take: Callable[[int], bytearray]) -> bytearray:
    """The command of this number. `take`: the next so many bytes. Raises ChannelError where another one came."""
    number, size = HEADER.unpack(take(HEADER.size))
    if number != due:
        raise ChannelError(f"command {number} came where {due} was due")
    return take(size)

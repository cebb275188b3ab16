"""The channel on which rank 0 sends commands to the other ranks of its group: each goes to every rank, in order."""

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

Chunk = bytes | bytearray | memoryview
EXIT_GROUP_LOST = 1
"""Exit status of a rank whose group is lost."""
HEADER = struct.Struct("!QQ")
"""Of a command: its number, counted from 1, and its size in bytes."""
SLICE_SECONDS = 0.5
"""A single wait counts at most this much towards a timeout: time for which this process was suspended is not the
peer's silence."""


class ChannelError(RuntimeError):
    """A rank cannot be reached any more, or sent something invalid. The group is lost."""


class RankGoneError(ChannelError):
    """This rank has closed its end, or died."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has disconnected")
        self.rank = rank


class ChannelSender(Protocol):
    """Rank 0's end. Several threads may send; only one may call the rest. Other ranks are numbered from 1."""

    @property
    def sent(self) -> int:
        """Commands sent so far."""
        ...

    def send(self, chunks: Sequence[Chunk]) -> None:
        """Send the concatenated chunks as one command. Raises ChannelError if a rank has disconnected, or does not make
        room in time; the channel is unusable then."""
        ...

    def idle(self) -> bool:
        """Whether no thread is sending at the moment."""
        ...

    def completed(self, rank: int) -> int:
        """Commands that this rank has completed."""
        ...

    def disconnected(self, rank: int) -> bool:
        """Whether this rank has closed its end, or died."""
        ...

    def close(self) -> None: ...


class ChannelReceiver(Protocol):
    """A follower's end; for one thread."""

    def receive(self, seconds: float) -> bytearray:
        """The next command. Raises ChannelError if rank 0 has disconnected, or has sent nothing for so many seconds."""
        ...

    def fileno(self) -> int:
        """The socket that hangs up when rank 0 disconnects."""
        ...

    def complete(self) -> None:
        """Report the latest command as completed."""
        ...

    def close(self) -> None: ...


def read_command(expected: int, read: Callable[[int], bytearray]) -> bytearray:
    """`read`: the next so many bytes. Raises ChannelError if the command does not have the expected number."""
    number, size = HEADER.unpack(read(HEADER.size))
    if number != expected:
        raise ChannelError(f"received command {number} instead of {expected}")
    return read(size)

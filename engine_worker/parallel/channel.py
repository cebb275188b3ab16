"""The channel on which rank 0 sends commands to the other ranks of its group. Each rank receives all commands, in
order."""

import struct
import threading
from abc import ABC, abstractmethod
from typing import Any

EXIT_GROUP_LOST = 1
"""Exit status of a rank whose group is lost."""
HEADER = struct.Struct("!QQ")
"""Header of a command: its number, counted from 1, and its size in bytes."""
SLICE_SECONDS = 0.5
"""A single wait counts at most this much towards a timeout, so that time for which this process was suspended is not
taken for the peer's silence."""


class ChannelError(RuntimeError):
    """A rank can no longer be reached, or has sent something invalid. The group is lost."""


class RankGoneError(ChannelError):
    """A rank has closed its end, or died."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has disconnected")
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank,)


class ChannelSender(ABC):
    """Rank 0's end. Several threads may call `send`; only one may call the other methods. Ranks are numbered from 1."""

    def __init__(self) -> None:
        self.sent = 0
        """Commands sent so far."""
        self._sending = threading.Lock()

    def send(self, message: bytes) -> int:
        """Send a command and return its number. Raises ChannelError if a rank has disconnected or does not make room in
        time; the channel is then unusable."""
        with self._sending:
            self._send(HEADER.pack(self.sent + 1, len(message)), message)
            self.sent += 1
            return self.sent

    def idle(self) -> bool:
        """Whether no thread is sending at the moment."""
        return not self._sending.locked()

    @abstractmethod
    def _send(self, header: bytes, message: bytes) -> None: ...

    @abstractmethod
    def completed(self, rank: int) -> int:
        """Number of commands that this rank has completed."""

    @abstractmethod
    def disconnected(self, rank: int) -> bool:
        """Whether this rank has closed its end, or died."""

    @abstractmethod
    def close(self) -> None: ...


class ChannelReceiver(ABC):
    """A follower's end. For one thread."""

    _received = 0
    """Commands received so far."""

    def receive(self, seconds: float) -> bytearray:
        """Wait for the next command. Raises ChannelError if rank 0 has disconnected or has sent nothing for `seconds`,
        or if the command does not have the expected number."""
        number, size = HEADER.unpack(self._read_bytes(HEADER.size, seconds))
        if number != self._received + 1:
            raise ChannelError(f"received command {number} instead of {self._received + 1}")
        message = self._read_bytes(size, seconds)
        self._received += 1
        return message

    @abstractmethod
    def _read_bytes(self, size: int, seconds: float) -> bytearray:
        """Wait for the next `size` bytes."""

    @abstractmethod
    def fileno(self) -> int:
        """Descriptor of the socket that hangs up when rank 0 disconnects."""

    @abstractmethod
    def complete(self) -> None:
        """Report the latest command as completed."""

    @abstractmethod
    def close(self) -> None: ...

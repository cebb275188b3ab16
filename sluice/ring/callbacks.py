"""Logits processors in a user's program: what an engine asks it, over a Unix socket on the same machine.

A call is a frame: a header in MessagePack, then a row of logits for each sequence. So is its answer, with the rows as
they are then. Of a sequence's tokens a call brings what is new: both sides keep those of the newest sequences.
"""

import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

SCHEME = "ipc://"
SIZES = struct.Struct("<IQ")
"""Bytes of the header, bytes of all rows."""
MAX_HEADER_BYTES = 256 << 20
MAX_LOGITS_BYTES = 16 << 30
MAX_SEQUENCES = 1024
MAX_TOKENS = 1 << 20

T = TypeVar("T")
H = TypeVar("H", bound=msgspec.Struct)


class CalledSequence(msgspec.Struct, frozen=True):
    number: int
    """On this connection."""
    request_id: str
    client_id: int | None
    keep: int
    """Of the tokens that the program has of this sequence, the first so many are right; 0: it may have none."""
    tokens: Sequence[int]
    """Those after these."""


class Call(msgspec.Struct, frozen=True):
    sequences: list[CalledSequence]
    """In the order of the rows."""


class Answer(msgspec.Struct, frozen=True):
    error: str | None = None
    """The type of an exception; the rows are left out then."""
    detail: str = ""
    """Its message, for the engine's log."""


class NewestSequences(Generic[T]):
    """What one side keeps of the sequences that were called for last. The other side, which sees the same calls in the
    same order, forgets the same ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._tokens = 0

    def pop(self, key: int) -> T | None:
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._tokens -= found[1]
        return found[0]

    def put(self, key: int, value: T, num_tokens: int) -> None:
        """One that is not there."""
        self._kept[key] = value, num_tokens
        self._tokens += num_tokens
        while len(self._kept) > MAX_SEQUENCES or (self._tokens > MAX_TOKENS and len(self._kept) > 1):
            _, (_, oldest) = self._kept.popitem(last=False)
            self._tokens -= oldest


class Frames:
    """Frames over a connected socket. Methods raise OSError, which TimeoutError is; ValueError for a malformed frame.

    `deadline`: by time.monotonic; None: no limit.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, header: msgspec.Struct, rows: Sequence[memoryview], deadline: float | None = None) -> None:
        encoded = msgspec.msgpack.encode(header)
        size = sum(row.nbytes for row in rows)
        parts: list[bytes | memoryview] = [SIZES.pack(len(encoded), size) + encoded, *rows]
        for part in parts:
            self._limit(deadline)
            self._socket.sendall(part)

    def receive(self, kind: type[H], deadline: float | None = None) -> tuple[H, int] | None:
        """The header, and the bytes of the rows, which `fill` takes next. None: the other side has closed."""
        sizes = bytearray(SIZES.size)
        if not self.fill(memoryview(sizes), deadline):
            return None
        header_bytes, logits_bytes = SIZES.unpack(sizes)
        if header_bytes > MAX_HEADER_BYTES or logits_bytes > MAX_LOGITS_BYTES:
            raise ValueError(f"a frame of {header_bytes} and {logits_bytes} bytes")
        encoded = bytearray(header_bytes)
        self.fill(memoryview(encoded), deadline)
        return msgspec.msgpack.decode(encoded, type=kind), logits_bytes

    def fill(self, buffer: memoryview, deadline: float | None = None) -> bool:
        """Receive as many bytes. False: the other side has closed, or what it had sent ends here."""
        buffer = buffer.cast("B")
        done = 0
        while done < len(buffer):
            self._limit(deadline)
            count = self._socket.recv_into(buffer[done:])
            if not count:
                return False
            done += count
        return True

    def close(self) -> None:
        self._socket.close()

    def _limit(self, deadline: float | None) -> None:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the time limit has passed")
            self._socket.settimeout(left)

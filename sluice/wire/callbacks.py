"""Logits processors in a user's program, which an engine calls over a Unix socket on the same machine.

A call is a frame: a header in MessagePack, followed by a row of logits for each sequence. The answer is a frame with
the processed rows. A call contains only the new tokens of a sequence; both sides store the tokens of recent sequences.
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
"""Sizes of the header and of all rows, in bytes."""
MAX_HEADER_BYTES = 256 << 20
MAX_LOGITS_BYTES = 16 << 30
MAX_SEQUENCES = 1024
MAX_TOKENS = 1 << 20

T = TypeVar("T")
H = TypeVar("H", bound=msgspec.Struct)


class CalledSequence(msgspec.Struct, frozen=True):
    number: int
    """Identifies the sequence on this connection."""
    request_id: str
    client_id: int | None
    keep: int
    """Number of leading tokens stored for this sequence that are still valid. 0: the program may have stored none."""
    tokens: Sequence[int]
    """The tokens after the first `keep`."""


class CallbackCall(msgspec.Struct, frozen=True):
    sequences: list[CalledSequence]
    """In the order of the rows."""


class Answer(msgspec.Struct, frozen=True):
    error: str | None = None
    """The type of an exception. If there is one, the frame has no rows."""
    detail: str = ""
    """The message of the exception, for the engine's log."""


class NewestSequences(Generic[T]):
    """One side's data of the most recently called sequences.

    Both sides see the same calls in the same order, so they drop the same sequences.
    """

    def __init__(self) -> None:
        self._stored: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._tokens = 0

    def pop(self, key: int) -> T | None:
        stored = self._stored.pop(key, None)
        if stored is None:
            return None
        value, num_tokens = stored
        self._tokens -= num_tokens
        return value

    def put(self, key: int, value: T, num_tokens: int) -> None:
        """Store a sequence that is not stored yet."""
        self._stored[key] = value, num_tokens
        self._tokens += num_tokens
        while len(self._stored) > MAX_SEQUENCES or (self._tokens > MAX_TOKENS and len(self._stored) > 1):
            _, (_, dropped_tokens) = self._stored.popitem(last=False)
            self._tokens -= dropped_tokens


class Frames:
    """Frames over a connected socket. Methods raise OSError (including TimeoutError), ValueError for a malformed frame.

    `deadline`: a time of time.monotonic; None: no limit.
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
        """The header, and the size in bytes of the rows, which must be read next with `fill`.

        None if the other side has closed the connection.
        """
        sizes = bytearray(SIZES.size)
        if not self.fill(memoryview(sizes), deadline):
            return None
        header_bytes, logits_bytes = SIZES.unpack(sizes)
        if header_bytes > MAX_HEADER_BYTES or logits_bytes > MAX_LOGITS_BYTES:
            raise ValueError(
                f"a frame has {header_bytes} bytes of header and {logits_bytes} bytes of logits, "
                f"more than {MAX_HEADER_BYTES} or {MAX_LOGITS_BYTES}"
            )
        encoded = bytearray(header_bytes)
        self.fill(memoryview(encoded), deadline)
        return msgspec.msgpack.decode(encoded, type=kind), logits_bytes

    def fill(self, buffer: memoryview, deadline: float | None = None) -> bool:
        """Receive as many bytes as `buffer` has. False if the other side has closed the connection before that."""
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
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("the deadline has passed")
            self._socket.settimeout(seconds)

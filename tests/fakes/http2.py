"""A gRPC client that sends what no library would: raw HTTP/2 (RFC 9113), headers as literals (RFC 7541)."""

import asyncio
import struct
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME = struct.Struct(">BHBBI")


class Connection:
    """One connection; `async with`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream = 1

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(PREFACE)
        self.send(SETTINGS, 0, 0, b"")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """One frame."""
        size = len(payload)
        self._writer.write(FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload)

    async def call(self, path: bytes, *metadata: tuple[bytes, bytes], message: bytes = b"") -> bool:
        """Whether the call was answered; False where the server closed the connection instead."""
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *metadata,
        ]
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
        self.send(HEADERS, END_HEADERS, self._stream, block)
        self.send(DATA, END_STREAM, self._stream, b"\0" + struct.pack(">I", len(message)) + message)
        self._stream += 2
        return await self._answered(self._stream - 2)

    async def _answered(self, stream: int) -> bool:
        try:
            while True:
                high, low, kind, flags, found = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                await self._reader.readexactly(high << 16 | low)
                if kind == SETTINGS and not flags & ACK:
                    self.send(SETTINGS, ACK, 0, b"")
                if found == stream and (kind == RESET or flags & END_STREAM):
                    return True
        except (asyncio.IncompleteReadError, ConnectionError):
            return False


def _text(value: bytes) -> bytes:
    """A string of HPACK, not Huffman coded; at most 126 bytes."""
    return bytes([len(value)]) + value

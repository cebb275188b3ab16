"""Raw HTTP/2 (RFC 9113, with literal headers of RFC 7541), for what gRPC libraries do not do.

A client that can send malformed calls, servers that accept connections and then never answer, or break.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME = struct.Struct(">BHBBI")


class Connection:
    """A client's connection, open within `async with`."""

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
        """Make a unary call. Returns False if the server closed the connection instead of answering."""
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

    async def pings(self, limit: int) -> int:
        """Answer the server's pings until there were `limit` or it closed the connection. Returns their number."""
        count = 0
        try:
            while count < limit:
                kind, flags, _, payload = await self._receive()
                if kind == PING and not flags & ACK:
                    count += 1
                    self.send(PING, ACK, 0, payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        return count

    async def _receive(self) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream and payload of the next frame. Acknowledges settings."""
        high, low, kind, flags, stream = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        payload = await self._reader.readexactly(high << 16 | low)
        if kind == SETTINGS and not flags & ACK:
            self.send(SETTINGS, ACK, 0, b"")
        return kind, flags, stream, payload

    async def _answered(self, stream: int) -> bool:
        try:
            while True:
                kind, flags, frame_stream, _ = await self._receive()
                if frame_stream == stream and (kind == RESET or flags & END_STREAM):
                    return True
        except (asyncio.IncompleteReadError, ConnectionError):
            return False


def _text(value: bytes) -> bytes:
    """An HPACK string of at most 126 bytes, without Huffman coding."""
    return bytes([len(value)]) + value


@asynccontextmanager
async def frozen_server() -> AsyncIterator[int]:
    """Opens each connection with its settings, then only reads. Yields the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for flags in (0, ACK):
            writer.write(FRAME.pack(0, 0, SETTINGS, flags, 0))
        while await reader.read(1 << 16):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def dying_router(target: str, absent_seconds: float = 0.3) -> AsyncIterator[str]:
    """A router that dies after it has received a call, and is back at the same address after `absent_seconds`.

    `target`: address of the router to which later connections are forwarded. Yields the address.
    """
    host, port = target.split(":")

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        for flags in (0, ACK):
            writer.write(FRAME.pack(0, 0, SETTINGS, flags, 0))
        await reader.readexactly(len(PREFACE))
        kind = SETTINGS
        while kind != HEADERS:
            high, low, kind, _, _ = FRAME.unpack(await reader.readexactly(FRAME.size))
            await reader.readexactly(high << 16 | low)
        writer.close()
        await asyncio.sleep(absent_seconds)
        servers.append(await asyncio.start_server(forward, *address))

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_copy(reader, outgoing), _copy(incoming, writer))

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    servers = [server]
    try:
        yield f"{address[0]}:{address[1]}"
    finally:
        for each in servers:
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(1 << 16):
        writer.write(block)
    writer.close()

"""HTTP connections with time and size limits that uvicorn lacks."""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0
"""Timeout for the request line and headers, from their first byte on; also for the first byte of a new connection."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum size of the request line and headers."""


class Connection(HttpToolsProtocol):
    """Closes a connection if it sends no request, if the request's head is too long, or if its client stops reading."""

    slow_client_timeout = 900.0
    """Seconds after which a connection is closed whose client does not read."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel enforces this timeout, even for a client that stays connected without reading.
            milliseconds = int(1000 * self.slow_client_timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head_bytes += len(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers exceed {MAX_HEAD_BYTES} bytes, the limit.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._cancel_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_timer()
        super().on_headers_complete()

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

"""HTTP connections with limits of time, size and number that uvicorn lacks."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.byte_budget import ByteBudget, OverBudget

HEAD_SECONDS = 30.0
"""Timeout for the request line and headers, from their first byte on; also for the first byte of a new connection."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum size of the request line and headers."""
PIECE_BYTES = 8 << 10
"""Data is parsed in pieces of this size, and only while the request before it does not have to be answered first."""
PIPELINED_BYTES = 4 << 10
"""What a request takes that waits for the one before it on its connection."""
LINGER_SECONDS = 5.0
"""Time for a client to send the rest of a body that has been refused, so that it reads the answer."""
IDLE_SECONDS = 1.0
"""While the gateway drains, an idle connection is closed after this time. A request that arrives before is answered,
and its answer tells the client to connect again."""
BEYOND_LIMIT = "beyond_limit"
"""Key in a request's state: its connection exceeds the limit."""


class WaitingConnections:
    """The connections that have no complete request, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._connections: dict[Connection, None] = {}

    def add(self, connection: "Connection") -> None:
        self._connections.pop(connection, None)
        self._connections[connection] = None

    def remove(self, connection: "Connection") -> None:
        self._connections.pop(connection, None)

    def close_oldest(self) -> bool:
        """False if there is none."""
        oldest = next(iter(self._connections), None)
        if oldest is not None:
            self.remove(oldest)
            oldest.transport.abort()
        return oldest is not None


class Reading(FlowControl):
    """Stays paused while parsed requests wait, and lets data that has been read be parsed before more is read."""

    def __init__(self, connection: "Connection", transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._connection = connection
        self._transport_paused = False

    def pause_reading(self) -> None:
        self.read_paused = True
        if not self._transport_paused:
            self._transport_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.read_paused or self._connection.pipeline:
            return
        self.read_paused = False
        # Not at once, because the caller is in the middle of ending a request.
        self._connection.loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._connection.parse()
        if self._transport_paused and not self.read_paused and not self._transport.is_closing():
            self._transport_paused = False
            self._transport.resume_reading()


class Connection(HttpToolsProtocol):
    """Closes a connection if it sends no request, if the request's head is too long, or if its client stops reading."""

    slow_client_timeout = 900.0
    """Seconds after which a connection is closed whose client does not read."""
    max_connections = 4096
    budget: ByteBudget
    waiting: WaitingConnections
    draining: Callable[[], bool]
    """Whether the server is about to end."""
    report_invalid: Callable[[], None]
    """Called for a request that is not HTTP, or whose head is too long."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._in_message = False
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unparsed = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Reading(self, transport)
        self._share = self.budget.share(self.client[0] if self.client else "")
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel enforces this timeout, even for a client that stays connected without reading.
            milliseconds = int(1000 * self.slow_client_timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._abort_after(HEAD_SECONDS)
        if len(self.connections) > self.max_connections and not self.waiting.close_oldest():
            self.app_state = {**self.app_state, BEYOND_LIMIT: True}
        self.waiting.add(self)
        if self.draining():
            # It was accepted while the server closed its port, and missed the server's `shutdown`.
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.waiting.remove(self)
        self._unparsed = memoryview(b"")
        self.budget.free(self._share)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._idle:
            self.loop.call_later(IDLE_SECONDS, self._close_if_idle)
        elif not self.cycle.response_complete:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        # The transport may deliver data that it read before it was paused.
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        self.parse()

    def parse(self) -> None:
        """Parse the data until a request has to wait for the one before it, or a body for being read."""
        while self._unparsed and not (self.flow.read_paused or self.transport.is_closing()):
            piece, self._unparsed = self._unparsed[:PIECE_BYTES], self._unparsed[PIECE_BYTES:]
            super().data_received(bytes(piece))
            self._head_bytes += len(piece)
            # A head may begin within its first piece.
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES + PIECE_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers exceed {MAX_HEAD_BYTES} bytes, the limit.")
        self._hold(len(self._unparsed) + PIPELINED_BYTES * len(self.pipeline))

    def send_400_response(self, msg: str) -> None:
        self.report_invalid()
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._in_message, self._head_bytes = True, True, 0
        self._abort_after(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_timer()
        super().on_headers_complete()
        if self.draining():
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False
        self._cancel_timer()
        if not self.cycle.response_complete:
            self.waiting.remove(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        self.waiting.add(self)
        if self._in_message:
            self._abort_after(LINGER_SECONDS)

    @property
    def _idle(self) -> bool:
        return not self._in_message and (self.cycle is None or self.cycle.response_complete)

    def _close_if_idle(self) -> None:
        if self._idle:
            self.transport.close()

    def _hold(self, size: int) -> None:
        """Count what waits on this connection."""
        if size == self._share.size:
            return
        self.budget.free(self._share)
        try:
            self._share.add(size)
        except OverBudget:
            self.transport.abort()

    def _abort_after(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

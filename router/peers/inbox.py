"""The router's inbox, which receives the messages of engines and detokenizers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq
from structlog.stdlib import BoundLogger

from sluice.host.limited_log import LimitedLog
from sluice.lanes.inbox import Gap, Inbox
from sluice.lanes.keys import KEYS_SECONDS, PLAIN, Security
from sluice.wire.requests import MAX_BYTES, SENDER, ToRouter

BATCH_MESSAGES = 32
"""Messages handled before yielding to other tasks."""
BATCH_SECONDS = 0.005
"""Time after which to yield to other tasks, although fewer messages were handled."""


class RouterInbox(Inbox[Any]):
    """Read by the event loop whenever ZeroMQ's descriptor wakes it. Passes every message and gap to `handle`, in
    order."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        handle: Callable[[ToRouter | Gap], None],
        log: BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        self._handle = handle
        self._failures = LimitedLog(log)
        self._loop: asyncio.AbstractEventLoop | None = None
        messages: Any = ToRouter
        super().__init__(context, address, messages, security=security, senders=SENDER, max_bytes=MAX_BYTES)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self.drain)
        # ZeroMQ's descriptor is edge-triggered: frames that arrived earlier would never wake the loop.
        self._loop.call_soon(self.drain)
        self._loop.call_later(KEYS_SECONDS, self._renew)

    def drain(self) -> None:
        """Handle one batch; reschedule itself while there may be more."""
        if self._loop is None:
            return
        until = time.monotonic() + BATCH_SECONDS
        for _ in range(BATCH_MESSAGES):
            for message in self.receive(1):
                self._handle_one(message)
            if not self.waiting:
                return
            if time.monotonic() >= until:
                break
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
            self._loop = None
        super().close()

    def _handle_one(self, message: ToRouter | Gap) -> None:
        try:
            self._handle(message)
        except Exception:  # noqa: BLE001 - one bad message must not prevent the handling of later ones
            self._failures.exception("message_failed", kind=type(message).__name__)

    def _renew(self) -> None:
        # Reload changed key files on a timer: with an outdated key no peer can connect, so no frame would trigger it.
        if self._loop is not None:
            self.renew()
            self._loop.call_later(KEYS_SECONDS, self._renew)

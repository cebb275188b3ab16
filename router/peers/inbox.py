"""Where the messages of engines and detokenizers arrive."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from structlog.stdlib import BoundLogger

from sluice.ring.inbox import Gap, Inbox
from sluice.ring.keys import KEYS_SECONDS, PLAIN, Security
from sluice.ring.wire import ToRouter

BATCH_MESSAGES = 32
"""Handled in one go; then other tasks get their turn."""


class RouterInbox(Inbox[Any]):
    """Read by the event loop when ZeroMQ's descriptor wakes it. Passes every message and gap to `handle`, in order."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        handle: Callable[[ToRouter | Gap], None],
        log: BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        self._handle = handle
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        messages: Any = ToRouter
        super().__init__(context, address, messages, security=security)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self.drain)
        # ZeroMQ's descriptor is edge-triggered: frames that arrived before would never wake us.
        self._loop.call_soon(self.drain)
        self._loop.call_later(KEYS_SECONDS, self._renew)

    def drain(self) -> None:
        """Handle one batch; reschedule itself while there may be more."""
        if self._loop is None:
            return
        messages = self.receive(BATCH_MESSAGES)
        if self.waiting:
            self._loop.call_soon(self.drain)
        for message in messages:
            try:
                self._handle(message)
            except Exception:  # noqa: BLE001 - one bad message must not stop those after it
                self._log.exception("message_failed", kind=type(message).__name__)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
            self._loop = None
        super().close()

    def _renew(self) -> None:
        # Read changed key files here: with an outdated key no peer connects, so no frame would trigger it.
        if self._loop is not None:
            self.renew()
            self._loop.call_later(KEYS_SECONDS, self._renew)

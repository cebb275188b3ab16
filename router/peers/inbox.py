"""The ring inbox on the event loop: woken by ZeroMQ's descriptor, drained in batches so that other tasks get turns."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
import zmq

from sluice.ring.inbox import Gap, Inbox
from sluice.ring.keys import KEYS_SECONDS, PLAIN, Security
from sluice.ring.wire import ToRouter

BATCH_MESSAGES = 32


class RouterInbox:
    """Passes every message and gap to `handle`, in order.

    Raises InsecureError for a TCP address without keys, ListenError if the address cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        handle: Callable[[ToRouter | Gap], None],
        log: structlog.stdlib.BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        messages: Any = ToRouter
        self._inbox: Inbox[Any] = Inbox(context, address, messages, security=security)
        self._handle = handle
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """As bound, with the port that was chosen."""
        return self._inbox.address

    @property
    def malformed(self) -> int:
        """Malformed frames dropped."""
        return self._inbox.malformed

    @property
    def refused(self) -> int:
        """Connection attempts without an admitted key."""
        return self._inbox.refused

    @property
    def gaps(self) -> int:
        """Gaps in the frame numbers of lanes."""
        return self._inbox.gaps

    def start(self) -> None:
        """Start reading, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fd, self.drain)
        # ZeroMQ's descriptor is edge-triggered: frames that arrived before would never wake us.
        self._loop.call_soon(self.drain)
        self._loop.call_later(KEYS_SECONDS, self._renew)

    def drain(self) -> None:
        """Handle one batch; reschedule itself while there may be more."""
        if self._loop is None:
            return
        messages = self._inbox.receive(BATCH_MESSAGES)
        if self._inbox.waiting:
            self._loop.call_soon(self.drain)
        for message in messages:
            try:
                self._handle(message)
            except Exception:  # noqa: BLE001 - one bad message must not stop those after it
                self._log.exception("message_failed", kind=type(message).__name__)

    def close(self) -> None:
        """Stop reading and unbind."""
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fd)
            self._loop = None
        self._inbox.close()

    def _renew(self) -> None:
        # Read changed key files here: with an outdated key no peer connects, so no frame would trigger it.
        if self._loop is not None:
            self._inbox.renew()
            self._loop.call_later(KEYS_SECONDS, self._renew)

"""The ring inbox on the event loop: woken by ZeroMQ's descriptor, drained in batches, others' turn between two."""

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
    """Hands every message and gap to `handle`, in order.

    Raises InsecureError for an address that must not be used, ListenError when it cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        handle: Callable[[ToRouter | Gap], None],
        logger: structlog.stdlib.BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        messages: Any = ToRouter
        self._inbox: Inbox[Any] = Inbox(context, address, messages, security=security)
        self._handle = handle
        self._logger = logger
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """The bound one."""
        return self._inbox.address

    @property
    def malformed(self) -> int:
        """Frames that were dropped."""
        return self._inbox.malformed

    @property
    def refused(self) -> int:
        """Peers that tried to connect without a key that is admitted."""
        return self._inbox.refused

    @property
    def gaps(self) -> int:
        """How often frames of a lane never came."""
        return self._inbox.gaps

    def start(self) -> None:
        """Begin to read, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fd, self.drain)
        # The descriptor tells of changes only: what came before must be fetched.
        self._loop.call_soon(self.drain)
        self._loop.call_later(KEYS_SECONDS, self._renew)

    def drain(self) -> None:
        """Take a batch; while there may be more, come back after the others' turn."""
        if self._loop is None:
            return
        messages = self._inbox.receive(BATCH_MESSAGES)
        if self._inbox.waiting:
            self._loop.call_soon(self.drain)
        for message in messages:
            try:
                self._handle(message)
            except Exception:  # a message that cannot be handled must not stop the ones after it
                self._logger.exception("message failed", kind=type(message).__name__)

    def close(self) -> None:
        """Stop reading and unbind."""
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fd)
            self._loop = None
        self._inbox.close()

    def _renew(self) -> None:
        """Where nobody gets in with our former key, nothing else would have us look."""
        if self._loop is not None:
            self._inbox.renew()
            self._loop.call_later(KEYS_SECONDS, self._renew)

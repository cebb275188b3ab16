"""The engine's copy of the routers' prompt adapters. The engine only stores them, so that a restarted router can read
them back: requests bring the tables that they use."""

import threading
import time
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from sluice.wire.adapters import AdapterChanges
from sluice.wire.prompt_adapters import (
    PromptAdapterMessage,
    PromptAdapterRead,
    PromptAdapterStore,
    StorePromptAdapter,
)


class PromptAdapters:
    """To be used in the engine's thread, except `changes_since`, which any thread may call."""

    def __init__(
        self,
        epoch: int,
        send: Callable[[str, PromptAdapterRead], None],
        log: BoundLogger,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`send`: (address of a router, message)."""
        self._epoch = epoch
        self._send = send
        self._log = log
        self._unix_time = unix_time
        self._store = PromptAdapterStore()
        self._lock = threading.Lock()
        """Guards the registry, which the heartbeat thread reads."""

    def changes_since(self, known: int) -> AdapterChanges | None:
        """See `AdapterRegistry.since`."""
        with self._lock:
            return self._store.registry.since(known)

    def on_message(self, message: PromptAdapterMessage) -> None:
        # Another epoch: the message is for an earlier process at this address.
        if message.engine_epoch != self._epoch:
            self._log.warning("adapter_message_dropped", reason="other_epoch", kind=type(message).__name__)
        elif isinstance(message, StorePromptAdapter):
            self._on_store(message)
        else:
            entry = self._store.registry.find(message.id)
            table = self._store.find(message.id)
            # If the adapter has been removed, the router learns that from the next heartbeat.
            if entry is not None and table is not None:
                self._send(message.router, PromptAdapterRead(self._epoch, entry, table))

    def _on_store(self, message: StorePromptAdapter) -> None:
        entry = message.entry
        with self._lock:
            stored = self._store.merge(entry, message.table, self._unix_time())
        if stored:
            self._log.info("prompt_adapter_registered", adapter=entry.id, version=entry.version, removed=entry.removed)

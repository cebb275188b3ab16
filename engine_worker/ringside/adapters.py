"""Adapters as the routers manage them, registered under ids: LoRA adapters, which are loaded from files or uploaded in
parts, and copies of prompt adapters, whose tables requests bring with them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from engine_worker.core.refusals import NO_ADAPTERS
from engine_worker.protocol import AdapterLibrary, Loading
from sluice.wire.adapter_registry import AdapterRegistry, PromptAdapterStore, merge_all
from sluice.wire.adapters import (
    AdapterChanges,
    AdapterEntries,
    AdapterEntry,
    AdapterLoaded,
    AdapterMessage,
    AdapterPart,
    LoadAdapter,
    PromptAdapterMessage,
    PromptAdapterRead,
    StorePromptAdapter,
)
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.tables import Table

MAX_LOADING = 64
"""Limit on loads that routers wait for."""
MAX_UPLOADS = 4
"""Limit on incomplete uploads; the least recently continued one is dropped."""
KEPT_SECONDS = 600.0
"""How long weights stay in memory after no id refers to them any more: a stream that uses them may still be resumed.
They are evicted earlier if host memory is needed."""
RELEASE_SECONDS = 1.0
"""Interval between attempts to free unnamed versions that are still in use."""

AdapterAnswer = AdapterLoaded | PromptAdapterRead


class KnownAdapters:
    """The registered adapters of one kind. To be used in the engine's thread, except `changes_since`, which any thread
    may call."""

    def __init__(
        self,
        registry: AdapterRegistry,
        epoch: int,
        send: Callable[[str, AdapterAnswer], None],
        log: BoundLogger,
        unix_time: Callable[[], float],
    ) -> None:
        """`send`: (address of a router, message)."""
        self._registry = registry
        self._epoch = epoch
        self._send = send
        self._log = log
        self._unix_time = unix_time
        self._lock = threading.Lock()
        """Guards the registry, which the heartbeat thread reads."""

    def changes_since(self, known: int) -> AdapterChanges | None:
        """See `AdapterRegistry.since`."""
        with self._lock:
            return self._registry.since(known)

    def _is_current(self, message: AdapterMessage | PromptAdapterMessage) -> bool:
        """Whether the message is not for an earlier process at this address."""
        if message.engine_epoch != self._epoch:
            self._log.warning("adapter_message_dropped", reason="other_epoch", kind=type(message).__name__)
        return message.engine_epoch == self._epoch


class _AwaitedLoad(NamedTuple):
    message: LoadAdapter
    loading: Loading


@dataclass(eq=False)
class _Upload:
    count: int
    """Number of parts of the complete upload."""
    parts: list[bytes] = field(default_factory=list)


class Adapters(KnownAdapters):
    """The LoRA adapters."""

    def __init__(
        self,
        library: AdapterLibrary | None,
        epoch: int,
        send: Callable[[str, AdapterAnswer], None],
        log: BoundLogger,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`library`: None if this engine serves no adapters."""
        super().__init__(AdapterRegistry(), epoch, send, log, unix_time)
        self._library = library
        self._loading: list[_AwaitedLoad] = []
        """Loads that routers wait for."""
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()
        """Incomplete uploads by version, the most recently continued last."""
        self._offered: OrderedDict[str, Loading] = OrderedDict()
        """Complete uploads that are being loaded, by version."""
        self._failed: OrderedDict[str, Fault] = OrderedDict()
        """Why the latest upload of a version failed to load, for a `LoadAdapter` that arrives afterwards."""
        self._unnamed: dict[str, float] = {}
        """Unix time since which no id refers to a version any more."""
        self._release_at = 0.0

    @property
    def pending(self) -> bool:
        """Whether routers wait for answers."""
        return bool(self._loading or self._offered)

    def on_message(self, message: AdapterMessage) -> None:
        if not self._is_current(message):
            return
        if isinstance(message, AdapterEntries):
            self._on_entries(message)
        elif isinstance(message, AdapterPart):
            self._on_part(message)
        else:
            self._on_load(message)

    def finish(self) -> None:
        """Answer loads that have finished, and free versions that have been unnamed for KEPT_SECONDS."""
        if self._offered:
            for version, loading in list(self._offered.items()):
                if loading.poll():
                    del self._offered[version]
                    if loading.fault is not None:
                        self._on_failed(version, loading.fault)
        if self._loading:
            unfinished = []
            for awaited in self._loading:
                if awaited.loading.poll():
                    self._answer(awaited)
                else:
                    unfinished.append(awaited)
            self._loading = unfinished
        if self._unnamed and self._library is not None and (now := self._unix_time()) >= self._release_at:
            self._release_at = now + RELEASE_SECONDS
            self._unnamed = {
                version: since
                for version, since in self._unnamed.items()
                if now - since < KEPT_SECONDS or not self._library.remove(version)
            }

    def _on_entries(self, message: AdapterEntries) -> None:
        with self._lock:
            previously_named = {entry.version for entry in self._registry.loaded()}
            changes = merge_all(self._registry, message.entries, self._unix_time())
            named = {entry.version for entry in self._registry.loaded()}
        now = self._unix_time()
        candidates = (*self._unnamed, *previously_named)
        self._unnamed = {version: self._unnamed.get(version, now) for version in candidates if version not in named}
        for entry in changes:
            self._log.info("adapter_registered", adapter=entry.id, version=entry.version, removed=entry.removed)

    def _on_part(self, message: AdapterPart) -> None:
        version = message.version
        if self._library is None or version in self._offered:
            return
        upload = self._uploads.get(version)
        if upload is None and message.index == 0:
            upload = self._uploads[version] = _Upload(message.count)
            self._failed.pop(version, None)
        if upload is not None and message.index < len(upload.parts):
            # A duplicate: two routers are sending the same files, or one router is sending them again.
            return
        if upload is None or message.index != len(upload.parts) or message.count != upload.count:
            # An earlier part was lost with a connection: the router will send all parts again.
            self._drop_upload(version, "part_out_of_order")
            return
        upload.parts.append(message.data)
        self._uploads.move_to_end(version)
        while len(self._uploads) > MAX_UPLOADS:
            self._drop_upload(next(iter(self._uploads)), "too_many_uploads")
        if len(upload.parts) == upload.count:
            del self._uploads[version]
            self._offered[version] = self._library.offer(version, upload.parts)

    def _drop_upload(self, version: str, reason: str) -> None:
        if self._uploads.pop(version, None) is not None:
            self._log.warning("adapter_upload_dropped", reason=reason, version=version)

    def _on_failed(self, version: str, fault: Fault) -> None:
        self._log.warning("adapter_upload_dropped", reason=fault.message, version=version)
        self._failed[version] = fault
        while len(self._failed) > MAX_LOADING:
            self._failed.popitem(last=False)

    def _on_load(self, message: LoadAdapter) -> None:
        version = message.version
        if self._library is None:
            self._refuse(message, NO_ADAPTERS)
        elif len(self._loading) >= MAX_LOADING:
            text = f"the engine is already loading {MAX_LOADING} adapters: try again later"
            self._refuse(message, Fault(ErrorCode.OVERLOADED.name, text))
        elif version is None:
            self._loading.append(_AwaitedLoad(message, self._library.load(message.path)))
        elif version in self._offered:
            self._loading.append(_AwaitedLoad(message, self._offered[version]))
        elif (rank := self._library.rank(version)) is not None:
            self._send(message.router, AdapterLoaded(self._epoch, message.number, version, rank))
        elif version in self._failed:
            self._refuse(message, self._failed[version])
        else:
            fault = Fault(ErrorCode.ADAPTER_MISSING.name, "the uploaded files of the adapter did not arrive")
            self._refuse(message, fault)

    def _answer(self, awaited: _AwaitedLoad) -> None:
        message, loading = awaited
        if loading.fault is not None:
            self._refuse(message, loading.fault)
            return
        self._log.info("adapter_loaded", version=loading.version, rank=loading.rank, path=message.path)
        self._send(message.router, AdapterLoaded(self._epoch, message.number, loading.version, loading.rank))

    def _refuse(self, message: LoadAdapter, fault: Fault) -> None:
        self._log.warning("adapter_refused", path=message.path, code=fault.code, reason=fault.message)
        self._send(message.router, AdapterLoaded(self._epoch, message.number, fault=fault))


class PromptAdapters(KnownAdapters):
    """The prompt adapters, which the engine only stores, so that a restarted router can read them back."""

    def __init__(
        self,
        epoch: int,
        send: Callable[[str, AdapterAnswer], None],
        log: BoundLogger,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._store = PromptAdapterStore()
        super().__init__(self._store.registry, epoch, send, log, unix_time)

    def on_message(self, message: PromptAdapterMessage) -> None:
        if not self._is_current(message):
            return
        if isinstance(message, StorePromptAdapter):
            self._on_store(message.entry, message.table)
            return
        entry, table = self._registry.find(message.id), self._store.find(message.id)
        # If the adapter has been removed, the router learns that from the next heartbeat.
        if entry is not None and table is not None:
            self._send(message.router, PromptAdapterRead(self._epoch, entry, table))

    def _on_store(self, entry: AdapterEntry, table: Table | None) -> None:
        with self._lock:
            stored = self._store.merge(entry, table, self._unix_time())
        if stored:
            self._log.info("prompt_adapter_registered", adapter=entry.id, version=entry.version, removed=entry.removed)

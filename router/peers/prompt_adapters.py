"""The ring's prompt adapters, seen from a router: it keeps all tables, and engines keep them for other routers."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from structlog.stdlib import BoundLogger

from router.errors import RequestError, shown
from router.peers.learning import Learning
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.ring.adapter_registry import CONFIGURED_AT, AdapterRegistry, has_more
from sluice.ring.adapters import MAX_ADAPTERS, AdapterEntry
from sluice.ring.errors import ErrorCode
from sluice.ring.heartbeats import EngineHeartbeat
from sluice.ring.prompt_adapters import (
    MAX_LOADED_BYTES,
    PromptAdapterRead,
    PromptAdapterStore,
    ReadPromptAdapter,
    StorePromptAdapter,
    version_of,
)
from sluice.ring.tables import MAX_TABLE_BYTES, Table

SYNC_SECONDS = 1.0
SYNC_BYTES = MAX_TABLE_BYTES
"""To one engine each time: what is behind them on the lane waits."""
RETRY_SECONDS = 5.0
"""Until a table is sent to an engine, or asked for, once more."""
MAX_READS = 4
"""At a time: heartbeats wait behind the tables."""
SETTLE_SECONDS = 3.0
KEPT_SECONDS = 600.0
"""For which a table stays after its id stands for another: a stream that began with it may be resumed here."""


class _Sent(NamedTuple):
    entry: AdapterEntry
    at: float


@dataclass(eq=False)
class _EngineView:
    """What an engine has said of its store."""

    known: int = 0
    """Number of its latest change that has come."""
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)
    sent: dict[str, _Sent] = field(default_factory=dict)
    """By id: what it has not confirmed."""


class _Wanted(NamedTuple):
    """An entry that this router lacks, and the epoch of an engine that has it."""

    entry: AdapterEntry
    epoch: int


class PromptAdapters:
    def __init__(
        self,
        membership: Membership,
        address: str,
        configured: Mapping[str, str],
        log: BoundLogger,
        unix_time: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: of this router's inbox. `configured`: paths by id, to be loaded from the start on."""
        self._membership = membership
        self._address = address
        self._log = log
        self._unix_time = unix_time
        self._clock = clock
        self._store = PromptAdapterStore(KEPT_SECONDS)
        self.learning = Learning(configured, log)
        self._views: dict[int, _EngineView] = {}
        """By the engine's epoch."""
        self._wanted: dict[str, _Wanted] = {}
        """By id."""
        self._asked: dict[str, float] = {}
        """By id: when an engine was asked for it."""
        self._arrived = asyncio.Event()
        """Set for a moment at each change."""

    # What is loaded.

    def find(self, adapter_id: str, version: str = "") -> Table | None:
        """What the id stands for; with `version` that table, whatever the id stands for now. None: it is not here."""
        return self._store.table(version) if version else self._store.find(adapter_id)

    def is_unknown(self, adapter_id: str) -> bool:
        """Whether no engine and no router has said anything of this id."""
        return adapter_id not in self._wanted and self._store.registry.latest(adapter_id) is None

    def loaded(self) -> list[AdapterEntry]:
        return sorted(self._store.registry.loaded(), key=lambda entry: entry.id)

    def load(self, adapter_id: str, path: str, table: Table, *, configured: bool = False) -> AdapterEntry:
        """From now on the id stands for this table; `configured`: unless the ring knows some change of it. Raises
        RequestError OVERLOADED."""
        registry, former = self._store.registry, self._store.find(adapter_id)
        if former is None and len(registry) >= MAX_ADAPTERS:
            message = f"{MAX_ADAPTERS} prompt adapters are loaded, the most there may be: unload one of them first"
            raise RequestError(ErrorCode.OVERLOADED, message)
        others = self._store.loaded_bytes - (0 if former is None else len(former.data))
        if others + len(table.data) > MAX_LOADED_BYTES:
            message = (
                f"the rows have {len(table.data)} bytes; the prompt adapters that are loaded have {others} of the "
                f"{MAX_LOADED_BYTES} bytes that there may be: unload some of them first"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        entry = AdapterEntry(adapter_id, CONFIGURED_AT, version_of(table), path, table.rows)
        return self._enter(entry, table) if configured else self._change(entry, table)

    def unload(self, adapter_id: str) -> bool:
        """New requests cannot name it any more; those that do go on. False: it was not loaded."""
        entry = self._store.registry.find(adapter_id)
        if entry is not None:
            self._change(msgspec.structs.replace(entry, removed=True), None)
        return entry is not None

    async def settle(self, adapter_id: str) -> None:
        """Wait for the latest table of this id, if this router does not have it, as just after its start.

        Raises RequestError: ADAPTER_MISSING if it does not come; as `Learning.wait`.
        """
        await self.learning.wait(adapter_id, lambda: not self.is_unknown(adapter_id))
        while adapter_id in self._wanted:
            await self._wait_for_table(adapter_id)
            # Its engine may have died before it sent the table.
            await self.learning.wait(adapter_id, lambda: not self.is_unknown(adapter_id))

    async def _wait_for_table(self, adapter_id: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while adapter_id in self._wanted:
                    await self._arrived.wait()
        if adapter_id in self._wanted:
            message = f"the rows of the prompt adapter {shown(adapter_id)} did not come from the engines: load it again"
            raise RequestError(ErrorCode.ADAPTER_MISSING, message, private=True)

    # What the ring's messages do.

    def known(self, epoch: int) -> int:
        """See `Hello.prompt_adapters_known`."""
        view = self._views.get(epoch)
        return 0 if view is None else view.known

    def on_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        news, now = heartbeat.prompt_adapters, self._unix_time()
        self.learning.on_heartbeat(more=has_more(news))
        if news is None:
            return
        view = self._view(heartbeat.epoch)
        view.known = news.last
        for entry in news.entries:
            view.registry.merge(entry, now)
            if entry.removed:
                self._merge(entry, None)
            else:
                self._update_wanted(entry.id)
        self._read_wanted()

    def on_read(self, message: PromptAdapterRead) -> None:
        entry = message.entry
        self._asked.pop(entry.id, None)
        if not message.table.intact:
            self._log.warning("prompt_adapter_dropped", adapter=entry.id, reason="damaged")
        elif not self._merge(entry, message.table) and entry.id in self._wanted:
            # Until it is asked for once more.
            self._asked[entry.id] = self._clock()
            self._log.warning("prompt_adapter_dropped", adapter=entry.id, reason="no_room")
        self._read_wanted()

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        if self._views.pop(peer.epoch, None) is not None:
            for adapter_id in [each for each, wanted in self._wanted.items() if wanted.epoch == peer.epoch]:
                self._asked.pop(adapter_id, None)
                self._update_wanted(adapter_id)

    async def run(self) -> None:
        """Keep all stores up to date, until it is cancelled."""
        while True:
            self._sync()
            self._read_wanted()
            self._store.forget(self._unix_time())
            await asyncio.sleep(SYNC_SECONDS)

    def _change(self, entry: AdapterEntry, table: Table | None) -> AdapterEntry:
        """By a call, which counts more than all changes that are known here."""
        at = self._store.registry.moment_of_change(entry.id, self._unix_time())
        return self._enter(msgspec.structs.replace(entry, changed_at=at), table)

    def _enter(self, entry: AdapterEntry, table: Table | None) -> AdapterEntry:
        self._merge(entry, table)
        self._sync()
        return entry

    def _merge(self, entry: AdapterEntry, table: Table | None) -> bool:
        """Whether it is news."""
        merged = self._store.merge(entry, table, self._unix_time())
        if merged:
            self._log.info("prompt_adapter_changed", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._update_wanted(entry.id)
        return merged

    def _update_wanted(self, adapter_id: str) -> None:
        latest, wanted = self._store.registry.latest(adapter_id), None
        for epoch, view in self._views.items():
            entry = view.registry.find(adapter_id)
            if entry is not None and entry.replaces(latest):
                wanted, latest = _Wanted(entry, epoch), entry
        if wanted is not None:
            self._wanted[adapter_id] = wanted
        else:
            self._wanted.pop(adapter_id, None)
        # Wakes those that wait now.
        self._arrived.set()
        self._arrived.clear()
        self.learning.on_change()

    def _read_wanted(self) -> None:
        """Ask for tables that this router lacks."""
        now, engines = self._clock(), {engine.epoch: engine for engine in self._membership.engines.alive}
        self._asked = {
            each: at for each, at in self._asked.items() if each in self._wanted and now - at < RETRY_SECONDS
        }
        for adapter_id, wanted in self._wanted.items():
            if len(self._asked) >= MAX_READS:
                return
            engine = engines.get(wanted.epoch)
            if adapter_id not in self._asked and engine is not None:
                engine.lane.send(ReadPromptAdapter(engine.epoch, adapter_id, self._address))
                self._asked[adapter_id] = now

    def _sync(self) -> None:
        """Send engines what they lack."""
        for engine in self._membership.engines.alive:
            if engine.heartbeat is not None:
                self._send_missing(engine, self._view(engine.epoch))

    def _send_missing(self, engine: EnginePeer, view: _EngineView) -> None:
        now, room = self._clock(), SYNC_BYTES
        missing = self._store.registry.missing_in(view.registry, self._unix_time())
        known = {entry.id: view.sent.get(entry.id) for entry in missing}
        view.sent = {each: sent for each, sent in known.items() if sent is not None and now - sent.at < RETRY_SECONDS}
        for entry in missing:
            sent = view.sent.get(entry.id)
            if sent is not None and sent.entry == entry:
                continue
            table = self._store.find(entry.id)
            room -= 0 if table is None else len(table.data)
            # What is left, or a full lane refuses, is sent a second later.
            if room < 0 or not engine.lane.send(StorePromptAdapter(engine.epoch, entry, table)):
                return
            view.sent[entry.id] = _Sent(entry, now)

    def _view(self, epoch: int) -> _EngineView:
        return self._views.setdefault(epoch, _EngineView())

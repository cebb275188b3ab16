"""The ring's prompt adapters as a router knows them. Each router has all tables, and engines store them for other
routers."""

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
from sluice.wire.adapter_registry import CONFIGURED_AT, AdapterRegistry, has_more
from sluice.wire.adapters import MAX_ADAPTERS, AdapterEntry
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.prompt_adapters import (
    MAX_LOADED_BYTES,
    PromptAdapterRead,
    PromptAdapterStore,
    ReadPromptAdapter,
    StorePromptAdapter,
    version_of,
)
from sluice.wire.tables import MAX_TABLE_BYTES, Table

SYNC_SECONDS = 1.0
SYNC_BYTES = MAX_TABLE_BYTES
"""Bytes of tables sent to one engine per round: other messages on the lane wait behind them."""
RETRY_SECONDS = 5.0
"""Delay before a table is sent to, or requested from, an engine again."""
MAX_READS = 4
"""Tables requested at the same time: heartbeats wait behind them."""
SETTLE_SECONDS = 3.0
"""Time for which a request waits for a table."""
KEPT_SECONDS = 600.0
"""Time for which a table is kept after its id was unloaded or refers to another table: a stream that began with it may
be resumed here."""


class _Sent(NamedTuple):
    entry: AdapterEntry
    at: float


@dataclass(eq=False)
class _EngineView:
    """An engine's store as far as its heartbeats have reported it."""

    known: int = 0
    """Number of the latest change that has been received."""
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)
    sent: dict[str, _Sent] = field(default_factory=dict)
    """By id: entries sent to the engine that it has not confirmed yet."""


class _Wanted(NamedTuple):
    """An entry that this router does not have, and the epoch of an engine that has it."""

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
        """`address`: address of this router's inbox. `configured`: paths by id of the adapters to load at the start."""
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
        self._requested: dict[str, float] = {}
        """By id: when the entry was requested from an engine."""
        self._arrived = asyncio.Event()
        """Pulsed at each change: set and cleared immediately."""

    # Loaded adapters.

    def find(self, adapter_id: str, version: str = "") -> Table | None:
        """The table that the id currently refers to; with `version`, the table of that version. None if this router
        does not have it."""
        return self._store.table(version) if version else self._store.find(adapter_id)

    def is_unknown(self, adapter_id: str) -> bool:
        """Whether neither this router nor any engine has reported this id."""
        return adapter_id not in self._wanted and self._store.registry.latest(adapter_id) is None

    def loaded(self) -> list[AdapterEntry]:
        return sorted(self._store.registry.loaded(), key=lambda entry: entry.id)

    def load(self, adapter_id: str, path: str, table: Table, *, configured: bool = False) -> AdapterEntry:
        """Make the id refer to this table.

        `configured`: the load comes from the settings, so any change of this id that the ring knows takes precedence.
        Raises RequestError OVERLOADED.
        """
        registry, former = self._store.registry, self._store.find(adapter_id)
        if former is None and len(registry) >= MAX_ADAPTERS:
            message = f"{MAX_ADAPTERS} prompt adapters are loaded, the limit: unload one of them first"
            raise RequestError(ErrorCode.OVERLOADED, message)
        used_bytes = self._store.loaded_bytes - (0 if former is None else len(former.data))
        if used_bytes + len(table.data) > MAX_LOADED_BYTES:
            message = (
                f"the rows have {len(table.data)} bytes; the loaded prompt adapters use {used_bytes} of at most "
                f"{MAX_LOADED_BYTES} bytes: unload some of them first"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        entry = AdapterEntry(adapter_id, CONFIGURED_AT, version_of(table), path, table.rows)
        return self._apply(entry, table) if configured else self._change(entry, table)

    def unload(self, adapter_id: str) -> bool:
        """Make an adapter unavailable to new requests. Running requests keep using it. False if it was not loaded."""
        entry = self._store.registry.find(adapter_id)
        if entry is not None:
            self._change(msgspec.structs.replace(entry, removed=True), None)
        return entry is not None

    async def settle(self, adapter_id: str, tenant: str = "") -> None:
        """Wait for the latest table of this id, if this router does not have it yet, for example just after its start.
        `tenant`: whose request waits.

        Raises RequestError: ADAPTER_MISSING if the table does not arrive, or an error of `Learning.wait`.
        """
        await self.learning.wait(adapter_id, lambda: not self.is_unknown(adapter_id), tenant)
        while adapter_id in self._wanted:
            with self.learning.place(tenant):
                await self._wait_for_table(adapter_id)
            # The engine may have died before it sent the table.
            await self.learning.wait(adapter_id, lambda: not self.is_unknown(adapter_id), tenant)

    async def _wait_for_table(self, adapter_id: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while adapter_id in self._wanted:
                    await self._arrived.wait()
        if adapter_id in self._wanted:
            message = f"no engine has sent the rows of the prompt adapter {shown(adapter_id)}: load it again"
            raise RequestError(ErrorCode.ADAPTER_MISSING, message, private=True)

    # Messages of the ring.

    def known(self, epoch: int) -> int:
        """The value of `Hello.prompt_adapters_known` for this engine."""
        view = self._views.get(epoch)
        return 0 if view is None else view.known

    def on_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        changes, now = heartbeat.prompt_adapters, self._unix_time()
        self.learning.on_heartbeat(more=has_more(changes))
        if changes is None:
            return
        view = self._view(heartbeat.epoch)
        view.known = changes.last
        for entry in changes.entries:
            view.registry.merge(entry, now)
            if entry.removed:
                self._merge(entry, None)
            else:
                self._update_wanted(entry.id)
        self._read_wanted()

    def on_read(self, message: PromptAdapterRead) -> None:
        entry = message.entry
        self._requested.pop(entry.id, None)
        if not message.table.intact:
            self._log.warning("prompt_adapter_dropped", adapter=entry.id, reason="damaged")
        elif not self._merge(entry, message.table) and entry.id in self._wanted:
            # Delay the next request for this table.
            self._requested[entry.id] = self._clock()
            self._log.warning("prompt_adapter_dropped", adapter=entry.id, reason="no_room")
        self._read_wanted()

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        if self._views.pop(peer.epoch, None) is not None:
            for adapter_id in [wanted_id for wanted_id, wanted in self._wanted.items() if wanted.epoch == peer.epoch]:
                self._requested.pop(adapter_id, None)
                self._update_wanted(adapter_id)

    async def run(self) -> None:
        """Keep all stores up to date. Runs until cancelled."""
        while True:
            self._sync()
            self._read_wanted()
            self._store.forget(self._unix_time())
            await asyncio.sleep(SYNC_SECONDS)

    def _change(self, entry: AdapterEntry, table: Table | None) -> AdapterEntry:
        """Apply a change made by a call. It takes precedence over all changes known here."""
        at = self._store.registry.moment_of_change(entry.id, self._unix_time())
        return self._apply(msgspec.structs.replace(entry, changed_at=at), table)

    def _apply(self, entry: AdapterEntry, table: Table | None) -> AdapterEntry:
        self._merge(entry, table)
        self._sync()
        return entry

    def _merge(self, entry: AdapterEntry, table: Table | None) -> bool:
        """Returns whether the entry has changed the store."""
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
        # Wake the requests that are waiting now.
        self._arrived.set()
        self._arrived.clear()
        self.learning.on_change()

    def _read_wanted(self) -> None:
        """Request tables that this router does not have."""
        now, engines = self._clock(), {engine.epoch: engine for engine in self._membership.engines.alive}
        self._requested = {
            adapter_id: at
            for adapter_id, at in self._requested.items()
            if adapter_id in self._wanted and now - at < RETRY_SECONDS
        }
        for adapter_id, wanted in self._wanted.items():
            if len(self._requested) >= MAX_READS:
                return
            engine = engines.get(wanted.epoch)
            if adapter_id not in self._requested and engine is not None:
                engine.lane.send(ReadPromptAdapter(engine.epoch, adapter_id, self._address))
                self._requested[adapter_id] = now

    def _sync(self) -> None:
        """Send engines the entries that they do not have."""
        for engine in self._membership.engines.alive:
            if engine.heartbeat is not None:
                self._send_missing(engine, self._view(engine.epoch))

    def _send_missing(self, engine: EnginePeer, view: _EngineView) -> None:
        now, room = self._clock(), SYNC_BYTES
        missing = self._store.registry.missing_in(view.registry, self._unix_time())
        latest = {entry.id: view.sent.get(entry.id) for entry in missing}
        view.sent = {
            adapter_id: sent
            for adapter_id, sent in latest.items()
            if sent is not None and now - sent.at < RETRY_SECONDS
        }
        for entry in missing:
            sent = view.sent.get(entry.id)
            if sent is not None and sent.entry == entry:
                continue
            table = self._store.find(entry.id)
            room -= 0 if table is None else len(table.data)
            # Entries beyond SYNC_BYTES, or refused by a full lane, are sent in the next round.
            if room < 0 or not engine.lane.send(StorePromptAdapter(engine.epoch, entry, table)):
                return
            view.sent[entry.id] = _Sent(entry, now)

    def _view(self, epoch: int) -> _EngineView:
        return self._views.setdefault(epoch, _EngineView())

"""The ring's prompt adapters as a router knows them. Each router has all tables, and engines store them for other
routers."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from router.errors import RequestError, shown
from router.peers.adapter_catalog import AdapterCatalog
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.adapter_registry import MAX_LOADED_BYTES, PromptAdapterStore
from sluice.wire.adapters import AdapterEntry, PromptAdapterRead, ReadPromptAdapter, StorePromptAdapter, version_of
from sluice.wire.errors import ErrorCode
from sluice.wire.offers import values_of
from sluice.wire.tables import MAX_TABLE_BYTES, Table

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


class _Wanted(NamedTuple):
    """An entry that this router does not have, and the epoch of an engine that has it."""

    entry: AdapterEntry
    epoch: int


class PromptAdapters(AdapterCatalog):
    kind = "prompt adapter"

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
        self._store = PromptAdapterStore(KEPT_SECONDS)
        super().__init__(membership, self._store.registry, configured, log, unix_time)
        self._address = address
        self._clock = clock
        self._sent: dict[int, dict[str, _Sent]] = {}
        """By the engine's epoch and the id: entries sent to an engine that it has not confirmed yet."""
        self._wanted: dict[str, _Wanted] = {}
        """By id."""
        self._requested: dict[str, float] = {}
        """By id: when the entry was requested from an engine."""
        self._arrived = asyncio.Event()
        """Pulsed at each change: set and cleared immediately."""

    def find(self, adapter_id: str, version: str = "") -> Table | None:
        """The table that the id currently refers to; with `version`, the table of that version. None if this router
        does not have it."""
        return self._store.table(version) if version else self._store.find(adapter_id)

    def is_unknown(self, adapter_id: str) -> bool:
        return adapter_id not in self._wanted and super().is_unknown(adapter_id)

    def load(self, adapter_id: str, path: str, table: Table, *, configured: bool = False) -> AdapterEntry:
        """Make the id refer to this table.

        `configured`: the load comes from the settings, so any change of this id that the ring knows takes precedence.
        Raises RequestError OVERLOADED.
        """
        self._check_room(adapter_id)
        former = self._store.find(adapter_id)
        used_bytes = self._store.loaded_bytes - (0 if former is None else len(former.data))
        if used_bytes + len(table.data) > MAX_LOADED_BYTES:
            message = (
                f"the rows have {len(table.data)} bytes; the loaded prompt adapters use {used_bytes} of at most "
                f"{MAX_LOADED_BYTES} bytes: unload some of them first"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        moment = self._moment(adapter_id, configured=configured)
        entry = AdapterEntry(adapter_id, moment, version_of(table), path, table.rows)
        self._merge(entry, table)
        self._sync()
        return entry

    async def settle(self, adapter_id: str, tenant: str = "") -> None:
        """Wait for the latest table of this id, if this router does not have it yet, for example just after its start.
        `tenant`: whose request waits.

        Raises RequestError: ADAPTER_MISSING if the table does not arrive, or an error of `Learning.wait`.
        """
        await super().settle(adapter_id, tenant)
        while adapter_id in self._wanted:
            with self._learning.place(tenant):
                await self._wait_for_table(adapter_id)
            # The engine may have died before it sent the table.
            await super().settle(adapter_id, tenant)

    async def _wait_for_table(self, adapter_id: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while adapter_id in self._wanted:
                    await self._arrived.wait()
        if adapter_id in self._wanted:
            message = f"no engine has sent the rows of the prompt adapter {shown(adapter_id)}: load it again"
            raise RequestError(ErrorCode.ADAPTER_MISSING, message, private=True)

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
        super().on_peer_lost(peer)
        self._sent.pop(peer.epoch, None)
        for adapter_id in [wanted_id for wanted_id, wanted in self._wanted.items() if wanted.epoch == peer.epoch]:
            self._requested.pop(adapter_id, None)
            self._update_wanted(adapter_id)

    def _on_reported(self, entries: Iterable[AdapterEntry]) -> None:
        for entry in entries:
            if entry.removed:
                self._merge(entry)
            else:
                self._update_wanted(entry.id)
        self._read_wanted()

    def _merge(self, entry: AdapterEntry, table: Table | None = None) -> bool:
        merged = self._store.merge(entry, table, self._unix_time())
        if merged:
            self._log.info("prompt_adapter_changed", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._update_wanted(entry.id)
        return merged

    def _update_wanted(self, adapter_id: str) -> None:
        latest, wanted = self._registry.latest(adapter_id), None
        for epoch, registry in self._reported.items():
            entry = registry.find(adapter_id)
            if entry is not None and entry.replaces(latest):
                wanted, latest = _Wanted(entry, epoch), entry
        if wanted is not None:
            self._wanted[adapter_id] = wanted
        else:
            self._wanted.pop(adapter_id, None)
        # Wake the requests that are waiting now.
        self._arrived.set()
        self._arrived.clear()
        self._learning.on_change()

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

    def _is_served(self) -> bool:
        heartbeats = [peer.heartbeat for peer in self._membership.engines.all if peer.heartbeat]
        return any(values_of("prompt_rows", heartbeat.offers) for heartbeat in heartbeats)

    def _sync(self) -> None:
        super()._sync()
        self._read_wanted()
        self._store.forget(self._unix_time())

    def _send(self, engine: EnginePeer, missing: list[AdapterEntry]) -> None:
        now, room, sent = self._clock(), SYNC_BYTES, self._sent.get(engine.epoch, {})
        recent = ((entry.id, sent.get(entry.id)) for entry in missing)
        sent = {adapter_id: each for adapter_id, each in recent if each and now - each.at < RETRY_SECONDS}
        self._sent[engine.epoch] = sent
        for entry in missing:
            if entry.id in sent and sent[entry.id].entry == entry:
                continue
            table = self._store.find(entry.id)
            room -= 0 if table is None else len(table.data)
            # Entries beyond SYNC_BYTES, or refused by a full lane, are sent in the next round.
            if room < 0 or not engine.lane.send(StorePromptAdapter(engine.epoch, entry, table)):
                return
            sent[entry.id] = _Sent(entry, now)

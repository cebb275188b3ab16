"""The ring's LoRA adapters as a router knows them. Each is loaded on every engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from structlog.stdlib import BoundLogger

from router.errors import RequestError, shown
from router.peers.adapter_catalog import AdapterCatalog
from router.peers.adapter_loads import AdapterFileStore, AdapterLoads
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.adapter_registry import AdapterRegistry
from sluice.wire.adapters import (
    MAX_MESSAGE_ENTRIES,
    Adapter,
    AdapterEntries,
    AdapterEntry,
    AdapterFiles,
    AdapterLoaded,
)
from sluice.wire.errors import ErrorCode
from sluice.wire.offers import LORA


class Adapters(AdapterCatalog):
    kind = "adapter"

    def __init__(
        self,
        membership: Membership,
        address: str,
        upload_memory: int,
        configured: Mapping[str, str],
        log: BoundLogger,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`address`: address of this router's inbox. `upload_memory`: limit in bytes. `configured`: paths by id of the
        adapters to load at the start."""
        super().__init__(membership, AdapterRegistry(), configured, log, unix_time)
        self.files = AdapterFileStore(upload_memory, self._is_registered)
        self.loads = AdapterLoads(address, self.files)

    def find(self, adapter_id: str) -> Adapter | None:
        """The adapter loaded under this id, if any."""
        entry = self._registry.find(adapter_id)
        return None if entry is None else entry.adapter

    async def settle(self, adapter_id: str, tenant: str = "") -> None:
        await self._learning.wait(
            adapter_id, lambda: not self.is_unknown(adapter_id) or self._is_without_adapters(), tenant
        )

    async def load_path(self, adapter_id: str, path: str, *, configured: bool = False) -> AdapterEntry:
        """Load an adapter on every engine, from a folder on their machines, and register it under this id.

        `configured`: the load comes from the settings, so any change of this id that the ring knows takes precedence.
        Raises RequestError.
        """
        self._check_room(adapter_id)
        answers = await self._on_all_engines(lambda engine: self.loads.load(engine, "path", path, None))
        return self._register(adapter_id, path, answers, configured=configured)

    async def load_files(self, adapter_id: str, field: str, files: AdapterFiles) -> AdapterEntry:
        """Load uploaded files on every engine and register them under this id. `field`: the field of the call that
        contained them. Raises RequestError."""
        self._check_room(adapter_id)
        # Hashing takes a second per GiB, so do it in a thread; the version is cached.
        await asyncio.to_thread(lambda: files.version)
        with self.files.using(files):
            version = files.version
            answers = await self._on_all_engines(lambda engine: self.loads.load(engine, field, "", version))
            # Register within the block, so that the files are kept after it.
            return self._register(adapter_id, "", answers)

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        super().on_peer_lost(peer)
        self.loads.on_peer_lost(peer)

    def _on_reported(self, entries: Iterable[AdapterEntry]) -> None:
        for entry in entries:
            self._merge(entry, "adapter_registered")

    def _merge(self, entry: AdapterEntry, event: str = "adapter_changed") -> bool:
        merged = self._registry.merge(entry, self._unix_time())
        if merged:
            self._log.info(event, adapter=entry.id, version=entry.version, removed=entry.removed)
        self._learning.on_change()
        return merged

    def _send(self, engine: EnginePeer, missing: list[AdapterEntry]) -> None:
        for start in range(0, len(missing), MAX_MESSAGE_ENTRIES):
            # If the lane is full, the next round sends them again.
            engine.lane.send(AdapterEntries(engine.epoch, missing[start : start + MAX_MESSAGE_ENTRIES]))

    def _engines(self) -> list[EnginePeer]:
        return [peer for peer in self._membership.engines.alive if peer.heartbeat and LORA in peer.heartbeat.offers]

    def _is_without_adapters(self) -> bool:
        """Whether engines are alive but none of them serves adapters."""
        return not self._engines() and any(peer.heartbeat for peer in self._membership.engines.alive)

    def _is_registered(self, version: str) -> bool:
        return any(entry.version == version for entry in self._registry.loaded())

    async def _on_all_engines(
        self, load: Callable[[EnginePeer], Awaitable[AdapterLoaded | None]]
    ) -> list[tuple[EnginePeer, AdapterLoaded]]:
        engines = self._engines()
        if not engines:
            if self._is_without_adapters():
                message = "no engine serves adapters: start engines with the setting lora (--set engine.lora=true)"
                raise RequestError(ErrorCode.NOT_BUILT_YET, message)
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive")
        answers = await asyncio.gather(*map(load, engines))
        loaded = [(engine, answer) for engine, answer in zip(engines, answers, strict=True) if answer is not None]
        if not loaded:
            raise RequestError(ErrorCode.ENGINE_LOST, "all engines were lost while they loaded the adapter")
        return loaded

    def _register(
        self,
        adapter_id: str,
        path: str,
        answers: Sequence[tuple[EnginePeer, AdapterLoaded]],
        *,
        configured: bool = False,
    ) -> AdapterEntry:
        versions = {loaded.version: engine.name for engine, loaded in answers}
        if len(versions) > 1:
            (version_a, engine_a), (version_b, engine_b) = list(versions.items())[:2]
            problem = (
                f"{shown(path)} has different files on {engine_a} ({version_a[:8]}) and on {engine_b} ({version_b[:8]})"
            )
            raise RequestError.at("path", problem, private=True)
        loaded = answers[0][1]
        rank = max(answer.rank for _, answer in answers)
        moment = self._moment(adapter_id, configured=configured)
        entry = AdapterEntry(adapter_id, moment, loaded.version, path, rank)
        self._merge(entry)
        self._sync()
        return entry

"""The ring's LoRA adapters as a router knows them. Each is loaded on every engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from structlog.stdlib import BoundLogger

from router.errors import RequestError, Violation, shown
from router.peers.adapter_files import AdapterFileStore
from router.peers.adapter_loads import AdapterLoads
from router.peers.learning import Learning
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.adapter_registry import CONFIGURED_AT, AdapterRegistry, has_more, merge_all
from sluice.wire.adapters import (
    MAX_ADAPTERS,
    MAX_MESSAGE_ENTRIES,
    Adapter,
    AdapterEntries,
    AdapterEntry,
    AdapterFiles,
    AdapterLoaded,
)
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.offers import LORA

SYNC_SECONDS = 1.0
LOAD_SECONDS = 300.0
"""Timeout for each engine to load an adapter."""


@dataclass(eq=False)
class _EngineView:
    """An engine's registry as far as its heartbeats have reported it."""

    known: int = 0
    """Number of the latest change that has been received."""
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)


class Adapters:
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
        self._membership = membership
        self._log = log
        self._unix_time = unix_time
        self._registry = AdapterRegistry()
        self._learning = Learning(configured, log)
        self.files = AdapterFileStore(upload_memory, self._is_registered)
        self.loads = AdapterLoads(address, self.files)
        self._views: dict[int, _EngineView] = {}
        """By the engine's epoch."""

    # Loaded adapters.

    def find(self, adapter_id: str) -> Adapter | None:
        """The adapter loaded under this id, if any."""
        entry = self._registry.find(adapter_id)
        return None if entry is None else entry.adapter

    async def settle(self, adapter_id: str, tenant: str = "") -> None:
        """If this router has just started, wait until engines have reported this id. `tenant`: whose request waits.

        Raises RequestError.
        """
        await self._learning.wait(
            adapter_id, lambda: self._registry.latest(adapter_id) is not None or self._is_without_adapters(), tenant
        )

    def loaded(self) -> list[AdapterEntry]:
        return sorted(self._registry.loaded(), key=lambda entry: entry.id)

    async def load_path(self, adapter_id: str, path: str, seconds: float, *, configured: bool = False) -> AdapterEntry:
        """Load an adapter on every engine, from a folder on their machines, and register it under this id.

        `configured`: the load comes from the settings, so any change of this id that the ring knows takes precedence.
        Raises RequestError.
        """
        self._check_room(adapter_id)
        answers = await self._on_all_engines(lambda engine: self.loads.load(engine, "path", path, None, seconds))
        return self._register(adapter_id, path, answers, configured=configured)

    async def load_files(self, adapter_id: str, field: str, files: AdapterFiles, seconds: float) -> AdapterEntry:
        """Load uploaded files on every engine and register them under this id. `field`: the field of the call that
        contained them. Raises RequestError."""
        self._check_room(adapter_id)
        # Hashing takes a second per GiB, so do it in a thread; the version is cached.
        await asyncio.to_thread(lambda: files.version)
        with self.files.using(files):
            version = files.version
            answers = await self._on_all_engines(lambda engine: self.loads.load(engine, field, "", version, seconds))
            # Register within the block, so that the files are kept after it.
            return self._register(adapter_id, "", answers)

    def unload(self, adapter_id: str) -> bool:
        """Make an adapter unavailable to new requests. Running requests keep using it. False if it was not loaded."""
        entry = self._registry.find(adapter_id)
        if entry is not None:
            self._change(msgspec.structs.replace(entry, removed=True))
        return entry is not None

    # Messages of the ring.

    def known(self, epoch: int) -> int:
        """The value of `Hello.adapters_known` for this engine."""
        view = self._views.get(epoch)
        return 0 if view is None else view.known

    def on_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        self._learning.on_heartbeat(more=has_more(heartbeat.adapters))
        if heartbeat.adapters is None:
            return
        view, now = self._views.setdefault(heartbeat.epoch, _EngineView()), self._unix_time()
        view.known = heartbeat.adapters.last
        merge_all(view.registry, heartbeat.adapters.entries, now)
        for entry in merge_all(self._registry, heartbeat.adapters.entries, now):
            self._log.info("adapter_registered", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._learning.on_change()

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        self._views.pop(peer.epoch, None)
        self.loads.on_peer_lost(peer)

    async def run(self) -> None:
        """Load the configured adapters and keep the engines' registries up to date. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            # Run concurrently, because a load may take minutes.
            tasks.create_task(self._load_configured())
            tasks.create_task(self._keep_in_sync())

    async def _keep_in_sync(self) -> None:
        while True:
            self._sync()
            await asyncio.sleep(SYNC_SECONDS)

    def _sync(self) -> None:
        for engine in self._engines():
            view = self._views.get(engine.epoch)
            missing = self._registry.missing_in(view.registry if view else AdapterRegistry(), self._unix_time())
            for start in range(0, len(missing), MAX_MESSAGE_ENTRIES):
                # If the lane is full, the next round sends them again.
                engine.lane.send(AdapterEntries(engine.epoch, missing[start : start + MAX_MESSAGE_ENTRIES]))

    async def _load_configured(self) -> None:
        while not self._engines():
            await asyncio.sleep(SYNC_SECONDS)
        # Engines that were running already may know newer changes of these ids.
        await asyncio.sleep(SYNC_SECONDS)
        await self._learning.load_configured(
            lambda adapter_id: self._registry.latest(adapter_id) is not None,
            lambda adapter_id, path: self.load_path(adapter_id, path, LOAD_SECONDS, configured=True),
        )

    def _engines(self) -> list[EnginePeer]:
        """Live engines that serve adapters."""
        return [peer for peer in self._membership.engines.alive if peer.heartbeat and LORA in peer.heartbeat.offers]

    def _is_without_adapters(self) -> bool:
        """Whether engines are alive but none of them serves adapters."""
        return not self._engines() and any(peer.heartbeat for peer in self._membership.engines.alive)

    def _is_registered(self, version: str) -> bool:
        return any(entry.version == version for entry in self._registry.loaded())

    def _check_room(self, adapter_id: str) -> None:
        if self._registry.find(adapter_id) is None and len(self._registry) >= MAX_ADAPTERS:
            message = f"{MAX_ADAPTERS} adapters are loaded, the limit: unload one of them first"
            raise RequestError(ErrorCode.OVERLOADED, message)

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
            raise RequestError.invalid([Violation("path", problem, private=True)])
        loaded = answers[0][1]
        rank = max(answer.rank for _, answer in answers)
        entry = AdapterEntry(adapter_id, CONFIGURED_AT, loaded.version, path, rank)
        return self._merge(entry) if configured else self._change(entry)

    def _change(self, entry: AdapterEntry) -> AdapterEntry:
        """Apply a change made by a call. It takes precedence over all changes known here."""
        at = self._registry.moment_of_change(entry.id, self._unix_time())
        return self._merge(msgspec.structs.replace(entry, changed_at=at))

    def _merge(self, entry: AdapterEntry) -> AdapterEntry:
        if self._registry.merge(entry, self._unix_time()):
            self._log.info("adapter_changed", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._learning.on_change()
        self._sync()
        return entry

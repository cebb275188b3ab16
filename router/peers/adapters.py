"""The ring's LoRA adapters, seen from a router: which are loaded, on every engine."""

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
from sluice.ring.adapter_registry import CONFIGURED_AT, AdapterRegistry, has_more, merge_all
from sluice.ring.adapters import (
    MAX_ADAPTERS,
    NEWS_ENTRIES,
    Adapter,
    AdapterEntries,
    AdapterEntry,
    AdapterFiles,
    AdapterLoaded,
)
from sluice.ring.errors import ErrorCode
from sluice.ring.heartbeats import EngineHeartbeat

SYNC_SECONDS = 1.0
LOAD_SECONDS = 300.0
"""For each engine to load an adapter."""


@dataclass(eq=False)
class _EngineView:
    """What an engine has said of its registry."""

    known: int = 0
    """Number of its latest change that has come."""
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
        """`address`: of this router's inbox. `upload_memory`: bytes. `configured`: paths by id, to be loaded from the
        start on."""
        self._membership = membership
        self._log = log
        self._unix_time = unix_time
        self._registry = AdapterRegistry()
        self._learning = Learning(configured, log)
        self.files = AdapterFileStore(upload_memory, self._is_named)
        self.loads = AdapterLoads(address, self.files)
        self._views: dict[int, _EngineView] = {}
        """By the engine's epoch."""

    # What is loaded.

    def find(self, adapter_id: str) -> Adapter | None:
        """None: no adapter is loaded under this id."""
        entry = self._registry.find(adapter_id)
        return None if entry is None else entry.adapter

    async def settle(self, adapter_id: str) -> None:
        """Wait for what the ring knows of this id, if this router has just started. Raises RequestError."""
        await self._learning.wait(
            adapter_id, lambda: self._registry.latest(adapter_id) is not None or self._is_without_adapters()
        )

    def loaded(self) -> list[AdapterEntry]:
        return sorted(self._registry.loaded(), key=lambda entry: entry.id)

    async def load_path(self, adapter_id: str, path: str, seconds: float, *, configured: bool = False) -> AdapterEntry:
        """On every engine, from a folder on their machines, and from now on under this id; `configured`: unless the
        ring knows some change of it. Raises RequestError."""
        self._check_room(adapter_id)
        answers = await self._on_all_engines(lambda engine: self.loads.load(engine, "path", path, None, seconds))
        return self._register(adapter_id, path, answers, configured=configured)

    async def load_files(self, adapter_id: str, field: str, files: AdapterFiles, seconds: float) -> AdapterEntry:
        """The same with uploaded files; `field`: of the call that brought them."""
        self._check_room(adapter_id)
        # Its hash takes a second per GiB.
        await asyncio.to_thread(lambda: files.version)
        with self.files.using(files):
            version = files.version
            answers = await self._on_all_engines(lambda engine: self.loads.load(engine, field, "", version, seconds))
            # Within: registered files are kept.
            return self._register(adapter_id, "", answers)

    def unload(self, adapter_id: str) -> bool:
        """New requests cannot name it any more; those that do go on. False: it was not loaded."""
        entry = self._registry.find(adapter_id)
        if entry is not None:
            self._change(msgspec.structs.replace(entry, removed=True))
        return entry is not None

    # What the ring's messages do.

    def known(self, epoch: int) -> int:
        """See `Hello.adapters_known`."""
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
        """Load what is configured, and keep the engines' registries up to date, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            # Beside each other: a load may take minutes.
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
            for start in range(0, len(missing), NEWS_ENTRIES):
                # A full lane gets them a second later.
                engine.lane.send(AdapterEntries(engine.epoch, missing[start : start + NEWS_ENTRIES]))

    async def _load_configured(self) -> None:
        while not self._engines():
            await asyncio.sleep(SYNC_SECONDS)
        # Engines that ran before may know newer changes of these ids.
        await asyncio.sleep(SYNC_SECONDS)
        await self._learning.load_configured(
            lambda adapter_id: self._registry.latest(adapter_id) is not None,
            lambda adapter_id, path: self.load_path(adapter_id, path, LOAD_SECONDS, configured=True),
        )

    def _engines(self) -> list[EnginePeer]:
        """Those that take adapters."""
        return [peer for peer in self._membership.engines.alive if peer.heartbeat and peer.heartbeat.has_adapters]

    def _is_without_adapters(self) -> bool:
        """Whether there are engines, and none takes adapters."""
        return not self._engines() and any(peer.heartbeat for peer in self._membership.engines.alive)

    def _is_named(self, version: str) -> bool:
        return any(entry.version == version for entry in self._registry.loaded())

    def _check_room(self, adapter_id: str) -> None:
        if self._registry.find(adapter_id) is None and len(self._registry) >= MAX_ADAPTERS:
            message = f"{MAX_ADAPTERS} adapters are loaded, the most there may be: unload one of them first"
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
        found = [(engine, answer) for engine, answer in zip(engines, answers, strict=True) if answer is not None]
        if not found:
            raise RequestError(ErrorCode.ENGINE_LOST, "the engines were lost while they loaded the adapter")
        return found

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
            (a, one), (b, other) = list(versions.items())[:2]
            found = f"{shown(path)} has other files on {one} ({a[:8]}) than on {other} ({b[:8]})"
            raise RequestError.invalid([Violation("path", found, private=True)])
        loaded = answers[0][1]
        rank = max(each.rank for _, each in answers)
        entry = AdapterEntry(adapter_id, CONFIGURED_AT, loaded.version, path, rank)
        return self._enter(entry) if configured else self._change(entry)

    def _change(self, entry: AdapterEntry) -> AdapterEntry:
        """By a call, which counts more than all changes that are known here."""
        at = self._registry.moment_of_change(entry.id, self._unix_time())
        return self._enter(msgspec.structs.replace(entry, changed_at=at))

    def _enter(self, entry: AdapterEntry) -> AdapterEntry:
        if self._registry.merge(entry, self._unix_time()):
            self._log.info("adapter_changed", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._learning.on_change()
        self._sync()
        return entry

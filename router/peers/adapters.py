"""The ring's LoRA adapters, seen from a router: which are loaded, on every engine, and the way of their files there."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from structlog.stdlib import BoundLogger

from router.errors import RequestError, Violation, shown
from router.peers.adapter_files import AdapterFileStore
from router.peers.learning import Learning
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.ring.adapter_registry import AdapterRegistry, merge_all
from sluice.ring.adapters import (
    MAX_ADAPTERS,
    NEWS_ENTRIES,
    Adapter,
    AdapterEntries,
    AdapterEntry,
    AdapterFiles,
    AdapterLoaded,
    LoadAdapter,
    parts_of,
)
from sluice.ring.errors import ErrorCode
from sluice.ring.heartbeats import EngineHeartbeat
from sluice.ring.message import Message

SYNC_SECONDS = 1.0
LOAD_SECONDS = 300.0
"""For each engine to load an adapter."""
FULL_LANE_RETRY_SECONDS = 0.005


@dataclass(eq=False)
class _EngineView:
    """What an engine has said of its registry."""

    known: int = 0
    """Number of its latest change that has come."""
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)


class _Pending(NamedTuple):
    engine: EnginePeer
    loaded: "asyncio.Future[AdapterLoaded | None]"
    """None: the engine was lost."""


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
        self._address = address
        self._log = log
        self._unix_time = unix_time
        self._registry = AdapterRegistry()
        self._learning = Learning(configured, log)
        self.files = AdapterFileStore(upload_memory, self._is_named)
        self._views: dict[int, _EngineView] = {}
        """By the engine's epoch."""
        self._pending: dict[int, _Pending] = {}
        self._supplies: dict[tuple[int, str], asyncio.Task[None]] = {}
        """Files on their way, by epoch and version."""

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

    async def load_path(self, adapter_id: str, path: str, seconds: float) -> AdapterEntry:
        """On every engine, from a folder on their machines, and from now on under this id. Raises RequestError."""
        self._check_room(adapter_id)
        answers = await self._on_all_engines(lambda engine: self._load(engine, path, None, seconds))
        return self._register(adapter_id, path, answers)

    async def load_files(self, adapter_id: str, files: AdapterFiles, seconds: float) -> AdapterEntry:
        """The same with uploaded files."""
        self._check_room(adapter_id)
        # Its hash takes a second per GiB.
        await asyncio.to_thread(lambda: files.version)
        with self.files.using(files):
            version = files.version
            answers = await self._on_all_engines(lambda engine: self._load(engine, "", version, seconds))
            # Within: registered files are kept.
            return self._register(adapter_id, "", answers)

    def unload(self, adapter_id: str) -> bool:
        """New requests cannot name it any more; those that do go on. False: it was not loaded."""
        entry = self._registry.find(adapter_id)
        if entry is not None:
            self._change(AdapterEntry(entry.id, 0.0, entry.version, entry.path, entry.size, removed=True))
        return entry is not None

    # What the ring's messages do.

    def known(self, epoch: int) -> int:
        """See `Hello.adapters_known`."""
        view = self._views.get(epoch)
        return 0 if view is None else view.known

    def on_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        self._learning.on_heartbeat()
        if heartbeat.adapters is None:
            return
        view, now = self._views.setdefault(heartbeat.epoch, _EngineView()), self._unix_time()
        view.known = heartbeat.adapters.last
        merge_all(view.registry, heartbeat.adapters.entries, now)
        for entry in merge_all(self._registry, heartbeat.adapters.entries, now):
            self._log.info("adapter_registered", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._learning.on_change()

    def on_loaded(self, loaded: AdapterLoaded) -> None:
        pending = self._pending.get(loaded.number)
        if pending is not None and not pending.loaded.done():
            pending.loaded.set_result(loaded)

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        self._views.pop(peer.epoch, None)
        for pending in self._pending.values():
            if pending.engine is peer and not pending.loaded.done():
                pending.loaded.set_result(None)

    # What requests need.

    def supply(self, engine: EnginePeer, version: str) -> bool:
        """Begin to send an adapter's files to an engine that lacks them. False: they are not here."""
        key, files = (engine.epoch, version), self.files.get(version)
        if files is None:
            return False
        if key not in self._supplies:
            task = asyncio.get_running_loop().create_task(self._send_files(engine, files))
            self._supplies[key] = task
            task.add_done_callback(lambda _: self._supplies.pop(key, None))
        return True

    def is_supplying(self, engine: EnginePeer, version: str) -> bool:
        """Whether a request with this adapter should wait: the engine would still refuse it."""
        return (engine.epoch, version) in self._supplies

    async def run(self) -> None:
        """Load what is configured, and keep the engines' registries up to date, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            # Beside each other: a load may take minutes.
            tasks.create_task(self._load_configured())
            tasks.create_task(self._keep_in_sync())

    def close(self) -> None:
        for task in list(self._supplies.values()):
            task.cancel()

    async def _keep_in_sync(self) -> None:
        while True:
            self._sync()
            await asyncio.sleep(SYNC_SECONDS)

    def _sync(self) -> None:
        for engine in self._engines():
            view = self._views.get(engine.epoch)
            missing = self._registry.missing_in(view.registry if view else AdapterRegistry())
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
            lambda adapter_id, path: self.load_path(adapter_id, path, LOAD_SECONDS),
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

    async def _load(self, engine: EnginePeer, path: str, version: str | None, seconds: float) -> AdapterLoaded | None:
        """None: the engine was lost. Raises RequestError."""
        number = secrets.randbits(63)
        loaded: asyncio.Future[AdapterLoaded | None] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(engine, loaded)
        try:
            async with asyncio.timeout(seconds):
                if version is not None and self.supply(engine, version):
                    futures: set[asyncio.Future[Any]] = {self._supplies[engine.epoch, version], loaded}
                    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                await self._send(engine, LoadAdapter(engine.epoch, number, self._address, path, version), loaded)
                found = await loaded
        except TimeoutError:
            message = f"the engine {engine.name} did not answer within {seconds:g} s"
            raise RequestError(ErrorCode.ENGINE_LOST, message) from None
        finally:
            del self._pending[number]
        if found is not None and found.fault is not None:
            raise _load_error(engine.name, found.fault.error_code, found.fault.message, path)
        return found

    async def _send_files(self, engine: EnginePeer, files: AdapterFiles) -> None:
        for part in parts_of(files, engine.epoch):
            if not await self._send(engine, part):
                return
            # Others have their turn between two parts.
            await asyncio.sleep(0)

    async def _send(
        self, engine: EnginePeer, message: Message, until: "asyncio.Future[AdapterLoaded | None] | None" = None
    ) -> bool:
        """False: the engine was lost before it could be sent."""
        while not engine.lane.send(message):
            if not engine.alive or (until is not None and until.done()):
                return False
            await asyncio.sleep(FULL_LANE_RETRY_SECONDS)
        return True

    def _register(
        self, adapter_id: str, path: str, answers: Sequence[tuple[EnginePeer, AdapterLoaded]]
    ) -> AdapterEntry:
        versions = {loaded.version: engine.name for engine, loaded in answers}
        if len(versions) > 1:
            (a, one), (b, other) = list(versions.items())[:2]
            found = f"{shown(path)} has other files on {one} ({a[:8]}) than on {other} ({b[:8]})"
            raise RequestError.invalid([Violation("path", found, private=True)])
        loaded = answers[0][1]
        rank = max(each.rank for _, each in answers)
        return self._change(AdapterEntry(adapter_id, 0.0, loaded.version, path, rank))

    def _change(self, entry: AdapterEntry) -> AdapterEntry:
        now = self._unix_time()
        at = self._registry.moment_of_change(entry.id, now)
        changed = AdapterEntry(entry.id, at, entry.version, entry.path, entry.size, entry.removed)
        self._registry.merge(changed, now)
        self._learning.on_change()
        self._log.info("adapter_changed", adapter=entry.id, version=entry.version, removed=entry.removed)
        self._sync()
        return changed


def _load_error(engine: str, code: ErrorCode, message: str, path: str) -> RequestError:
    field = "path" if path else "the files"
    return RequestError.invalid([Violation(field, f"cannot be loaded by {engine}: {message}", private=True)], code)

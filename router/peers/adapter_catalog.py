"""What LoRA adapters and prompt adapters have in common: the latest change of each id, and how it reaches all routers
and engines.

Engines store all changes. A change made by a call is sent to all engines, and they report it to the other routers.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar

import msgspec
from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.learning import Learning
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.adapter_registry import CONFIGURED_AT, AdapterRegistry, has_more, merge_all
from sluice.wire.adapters import MAX_ADAPTERS, AdapterChanges, AdapterEntry
from sluice.wire.errors import ErrorCode

SYNC_SECONDS = 1.0


class AdapterCatalog(ABC):
    """The adapters of one kind."""

    kind: ClassVar[str]
    """Its name in messages."""

    def __init__(
        self,
        membership: Membership,
        registry: AdapterRegistry,
        configured: Mapping[str, str],
        log: BoundLogger,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`configured`: paths by id of the adapters to load at the start."""
        self._membership = membership
        self._registry = registry
        self._learning = Learning(configured, log)
        self._log = log
        self._unix_time = unix_time
        self._reported = defaultdict[int, AdapterRegistry](AdapterRegistry)
        """What the heartbeats of each engine have reported, by its epoch."""
        self._known: dict[int, int] = {}
        """Number of the latest change in it."""

    def loaded(self) -> list[AdapterEntry]:
        return self._registry.loaded()

    def is_unknown(self, adapter_id: str) -> bool:
        """Whether neither this router nor any engine has reported this id."""
        return self._registry.latest(adapter_id) is None

    async def settle(self, adapter_id: str, tenant: str = "") -> None:
        """If this router has just started, wait until engines have reported this id. `tenant`: whose request waits.

        Raises RequestError.
        """
        await self._learning.wait(adapter_id, lambda: not self.is_unknown(adapter_id), tenant)

    def unload(self, adapter_id: str) -> bool:
        """Make an adapter unavailable to new requests. Running requests keep using it. False if it was not loaded."""
        entry = self._registry.find(adapter_id)
        if entry is not None:
            self._merge(msgspec.structs.replace(entry, changed_at=self._moment(adapter_id), removed=True))
            self._sync()
        return entry is not None

    def known(self, epoch: int) -> int:
        """Number of this engine's latest change that has been received, for `Hello`."""
        return self._known.get(epoch, 0)

    def on_heartbeat(self, epoch: int, changes: AdapterChanges | None) -> None:
        """`changes`: what an engine's heartbeat reports about adapters of this kind."""
        self._learning.on_heartbeat(more=has_more(changes))
        if changes is not None:
            self._known[epoch] = changes.last
            merge_all(self._reported[epoch], changes.entries, self._unix_time())
            self._on_reported(changes.entries)

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        self._reported.pop(peer.epoch, None)
        self._known.pop(peer.epoch, None)

    async def run(self, load: Callable[[str, str], Awaitable[Any]]) -> None:
        """Load the configured adapters, and keep the engines up to date. Runs until cancelled.

        `load` is called with (id, path) and may raise RequestError.
        """
        async with asyncio.TaskGroup() as tasks:
            # Run concurrently, because a load may take minutes.
            tasks.create_task(self._load_configured(load))
            tasks.create_task(self._keep_in_sync())

    async def _load_configured(self, load: Callable[[str, str], Awaitable[Any]]) -> None:
        while not self._is_served():
            await asyncio.sleep(SYNC_SECONDS)
        # Engines that were running already may know newer changes of these ids.
        await asyncio.sleep(SYNC_SECONDS)
        await self._learning.load_configured(lambda adapter_id: not self.is_unknown(adapter_id), load)

    async def _keep_in_sync(self) -> None:
        while True:
            self._sync()
            await asyncio.sleep(SYNC_SECONDS)

    def _sync(self) -> None:
        """Send engines the entries that they do not have."""
        now = self._unix_time()
        for engine in self._engines():
            self._send(engine, self._registry.missing_in(self._reported[engine.epoch], now))

    def _engines(self) -> list[EnginePeer]:
        """Live engines that store adapters of this kind."""
        return [peer for peer in self._membership.engines.alive if peer.heartbeat]

    def _is_served(self) -> bool:
        """Whether adapters can be loaded yet."""
        return bool(self._engines())

    def _check_room(self, adapter_id: str) -> None:
        """Raises RequestError OVERLOADED."""
        if self._registry.find(adapter_id) is None and len(self._registry) >= MAX_ADAPTERS:
            message = f"{MAX_ADAPTERS} {self.kind}s are loaded, the limit: unload one of them first"
            raise RequestError(ErrorCode.OVERLOADED, message)

    def _moment(self, adapter_id: str, *, configured: bool = False) -> float:
        """`changed_at` of a change that takes precedence over all changes known here; or, if it comes from the
        settings, of one over which any change that the ring knows takes precedence."""
        return CONFIGURED_AT if configured else self._registry.moment_of_change(adapter_id, self._unix_time())

    @abstractmethod
    def _merge(self, entry: AdapterEntry) -> bool:
        """Add an entry if it is newer than the known one. Returns whether it was added."""

    @abstractmethod
    def _on_reported(self, entries: Iterable[AdapterEntry]) -> None:
        """Apply entries that an engine has reported."""

    @abstractmethod
    def _send(self, engine: EnginePeer, missing: list[AdapterEntry]) -> None:
        """Send an engine entries that it does not have. Those for which there is no room are sent in a later round."""

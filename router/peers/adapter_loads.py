"""Loads adapters on engines: sends load requests, receives their answers, and sends files in parts."""

import asyncio
import secrets
from typing import Any, NamedTuple

from router.errors import RequestError, Violation
from router.peers.adapter_files import AdapterFileStore
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.adapters import AdapterFiles, AdapterLoaded, LoadAdapter, parts_of
from sluice.wire.errors import ErrorCode
from sluice.wire.message import Message

LOAD_SECONDS = 300.0
"""Timeout for each engine to load an adapter."""
FULL_LANE_RETRY_SECONDS = 0.005


class _Pending(NamedTuple):
    engine: EnginePeer
    loaded: "asyncio.Future[AdapterLoaded | None]"
    """The engine's answer; None if the engine was lost."""


class AdapterLoads:
    def __init__(self, address: str, files: AdapterFileStore) -> None:
        """`address`: address of this router's inbox."""
        self._address = address
        self._files = files
        self._pending: dict[int, _Pending] = {}
        """By number of the load request."""
        self._supplies: dict[tuple[int, str], asyncio.Task[None]] = {}
        """Tasks that send files to engines, by the engine's epoch and the version."""

    def close(self) -> None:
        for task in list(self._supplies.values()):
            task.cancel()

    async def load(self, engine: EnginePeer, field: str, path: str, version: str | None) -> AdapterLoaded | None:
        """Load an adapter into an engine's host memory: from `path` on its machine, or from the stored files of
        `version`. Returns None if the engine was lost.

        Raises RequestError; if the files are bad, as a violation of `field`.
        """
        number = secrets.randbits(63)
        loaded: asyncio.Future[AdapterLoaded | None] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(engine, loaded)
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                if version is not None and self.supply(engine, version):
                    futures: set[asyncio.Future[Any]] = {self._supplies[engine.epoch, version], loaded}
                    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                await self._send(engine, LoadAdapter(engine.epoch, number, self._address, path, version), loaded)
                answer = await loaded
        except TimeoutError:
            message = f"the engine {engine.name} did not answer within {LOAD_SECONDS:g} s"
            raise RequestError(ErrorCode.ENGINE_LOST, message) from None
        finally:
            del self._pending[number]
        if answer is not None and answer.fault is not None:
            refused = Violation(field, f"cannot be loaded by {engine.name}: {answer.fault.message}", private=True)
            raise RequestError.invalid([refused], answer.fault.error_code)
        return answer

    def supply(self, engine: EnginePeer, version: str) -> bool:
        """Start sending an adapter's files to an engine. False if this router does not have the files."""
        key, files = (engine.epoch, version), self._files.get(version)
        if files is None:
            return False
        if key not in self._supplies:
            task = asyncio.get_running_loop().create_task(self._send_files(engine, files))
            self._supplies[key] = task
            task.add_done_callback(lambda _: self._supplies.pop(key, None))
        return True

    def is_supplying(self, engine: EnginePeer, version: str) -> bool:
        """Whether the adapter's files are still being sent, so that the engine would refuse a request with it."""
        return (engine.epoch, version) in self._supplies

    def on_loaded(self, loaded: AdapterLoaded) -> None:
        pending = self._pending.get(loaded.number)
        if pending is not None and not pending.loaded.done():
            pending.loaded.set_result(loaded)

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer) -> None:
        for pending in self._pending.values():
            if pending.engine is peer and not pending.loaded.done():
                pending.loaded.set_result(None)

    async def _send_files(self, engine: EnginePeer, files: AdapterFiles) -> None:
        for part in parts_of(files, engine.epoch):
            if not await self._send(engine, part):
                return
            # Yield to other tasks between two parts.
            await asyncio.sleep(0)

    async def _send(
        self, engine: EnginePeer, message: Message, until: "asyncio.Future[AdapterLoaded | None] | None" = None
    ) -> bool:
        """Send a message once the lane has room. False if the engine was lost, or `until` was done, before that."""
        while not engine.lane.send(message):
            if not engine.alive or (until is not None and until.done()):
                return False
            await asyncio.sleep(FULL_LANE_RETRY_SECONDS)
        return True

"""Loads adapters on engines: sends load requests, receives their answers, keeps uploaded files and sends them in
parts."""

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from router.errors import RequestError, Violation
from router.peers.peers import DetokenizerPeer, EnginePeer
from sluice.wire.adapters import AdapterFiles, AdapterLoaded, LoadAdapter, parts_of
from sluice.wire.errors import ErrorCode
from sluice.wire.message import Message

LOAD_SECONDS = 300.0
"""Timeout for each engine to load an adapter."""
FULL_LANE_RETRY_SECONDS = 0.005


class AdapterFileStore:
    """Files of uploaded adapters, kept to be sent to engines: at most `limit` bytes. Files that are no longer needed
    are evicted to make room for new ones."""

    def __init__(self, limit: int, is_registered: Callable[[str], bool]) -> None:
        """`is_registered`: whether an adapter id currently refers to this version."""
        self._limit = limit
        self._is_registered = is_registered
        self._files: OrderedDict[str, AdapterFiles] = OrderedDict()
        """By version, least recently added first."""
        self._users: Counter[str] = Counter()
        """By version: number of calls that currently need the files."""

    @property
    def nbytes(self) -> int:
        return sum(files.nbytes for files in self._files.values())

    def get(self, version: str) -> AdapterFiles | None:
        return self._files.get(version)

    def add(self, files: AdapterFiles) -> str:
        """Store the files and return their version. Raises RequestError OVERLOADED if there is no room."""
        version = files.version
        if version in self._files:
            self._files.move_to_end(version)
            return version
        evictable = [stored for stored in self._files if not self._users[stored] and not self._is_registered(stored)]
        while evictable and self.nbytes + files.nbytes > self._limit:
            del self._files[evictable.pop(0)]
        if self.nbytes + files.nbytes > self._limit:
            message = (
                f"the adapter's files have {files.nbytes} bytes; the adapters in use take {self.nbytes} of the "
                f"{self._limit} bytes of lora_upload_memory"
            )
            raise RequestError(ErrorCode.OVERLOADED, message)
        self._files[version] = files
        return version

    @contextmanager
    def using(self, files: AdapterFiles) -> Iterator[None]:
        """Keep a call's uploaded files until the end of the `with` block. If the block succeeds, they stay until their
        room is needed.

        Raises RequestError OVERLOADED if there is no room.
        """
        version, succeeded = self.add(files), False
        self._users[version] += 1
        try:
            yield
            succeeded = True
        finally:
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]
                if not (succeeded or self._is_registered(version)):
                    del self._files[version]


class _PendingLoad(NamedTuple):
    engine: EnginePeer
    loaded: "asyncio.Future[AdapterLoaded | None]"
    """The engine's answer; None if the engine was lost."""


class AdapterLoads:
    def __init__(self, address: str, files: AdapterFileStore) -> None:
        """`address`: address of this router's inbox."""
        self._address = address
        self._files = files
        self._pending: dict[int, _PendingLoad] = {}
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
        self._pending[number] = _PendingLoad(engine, loaded)
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

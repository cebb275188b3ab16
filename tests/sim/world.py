"""Replacements for sockets, gRPC, time and the model in the simulated services."""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import engine_worker.ringside.heartbeats
import engine_worker.ringside.worker
import router.app
import router.peers.peers
import router.requests.handover
import router.ring_side
from detok_service.decoders import BytesByToken
from engine_worker.ringside.identity import Identity
from router.api.generation_service import GenerationService
from router.text.tokenizer_pool import TokenizerPool
from sluice.checkpoint.folder import open_checkpoint
from sluice.host.memory_files import is_in_memory
from sluice.tiny_model import path
from sluice.wire.requests import ToRouter
from tests.fakes.scripted_tokens import VOCAB
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network, SimInbox

PIECES = [
    b" ",
    b"ab",
    b"\n",
    b"end",
    b"\xe6",
    b"\x97\xa5",
    b"\xf0\x9f",
    b"\x99",
    b"\x82",
    b"\xe6\x97",
    b"stop",
    b"s",
    b"top",
]
"""Bytes of tokens, among them parts of characters and of stop strings."""


@cache
def checkpoint():
    return open_checkpoint(str(path()), "tiny")


@cache
def text() -> TokenizerPool:
    return TokenizerPool(checkpoint(), 1, 1)


@cache
def tables() -> tuple[BytesByToken, dict[int, str]]:
    """The bytes of every token, and the text of every token that is complete in itself."""
    data = {token: PIECES[token % len(PIECES)] if token % 3 else bytes([97 + token % 26]) for token in range(VOCAB)}
    complete = {token: piece.decode() for token, piece in data.items() if piece.isascii()}
    return BytesByToken(data), complete


HAND_OVER_TOKENS = 6
GROUP = "machine"
"""All engines share a group. Without pool files they copy nothing."""

GENERATIONS: list[GenerationService] = []
"""The service of the router that is being constructed."""


def generation_service(*parts) -> GenerationService:
    GENERATIONS.append(GenerationService(*parts))
    return GENERATIONS[-1]


@contextmanager
def simulated(network: Network, loop: VirtualLoop):
    """Services that are constructed within this context use the network's lanes and the loop's clock."""
    replacements = {
        (router.peers.peers, "Lane"): network.lane,
        (router.ring_side, "RouterInbox"): lambda _, address, handle, *__: SimRouterInbox(network, address, handle),
        (router.app, "Listener"): NoListener,
        (router.app, "GenerationService"): generation_service,
        (router.app, "TokenizerPool"): lambda *_: text(),
        (engine_worker.ringside.worker, "Inbox"): lambda _, address, messages, security: SimInbox(
            network, address, messages
        ),
        (engine_worker.ringside.worker, "Lane"): network.lane,
        (engine_worker.ringside.worker, "Identity"): lambda *values, **fields: Identity(
            *values, **fields | {"kv_group": GROUP}
        ),
        (router.requests.handover, "HAND_OVER_TOKENS"): HAND_OVER_TOKENS,
        (engine_worker.ringside.heartbeats, "Lane"): network.lane,
        (time, "monotonic"): loop.time,
        (time, "time"): loop.time,
        (secrets, "randbits"): network.numbers.getrandbits,
    }
    with ExitStack() as stack:
        for (module, name), replacement in replacements.items():
            stack.enter_context(patch.object(module, name, replacement))
        yield


@contextmanager
def pool_files(wanted: bool) -> Iterator[Path | None]:
    """A folder in memory for the engines' pool files. None if none is wanted, or if this system has none."""
    parent = Path("/dev/shm")
    if not (wanted and is_in_memory(parent)):
        yield None
        return
    with tempfile.TemporaryDirectory(dir=parent, prefix="sluice-sim-") as folder:
        yield Path(folder)


class SimRouterInbox:
    """`router.ring_side.RouterInbox` over a SimInbox."""

    def __init__(self, network: Network, address: str, handle) -> None:
        self._inbox = SimInbox(network, address, ToRouter)
        self._handle = handle
        self._started = False
        self.address = address
        self.refused = 0

    malformed = property(lambda self: self._inbox.malformed)
    gaps = property(lambda self: self._inbox.gaps)

    def start(self) -> None:
        self._started = True
        self._inbox.on_arrival = lambda: asyncio.get_running_loop().call_soon(self._drain)
        self._drain()

    def close(self) -> None:
        self._started = False
        self._inbox.close()

    def _drain(self) -> None:
        if self._started:
            for message in self._inbox.receive(32):
                self._handle(message)


class NoListener:
    """Stands in for the gRPC server."""

    def __init__(self, *_) -> None:
        self.address, self.port = "sim", 1

    def bind(self) -> None: ...

    async def start(self) -> None: ...

    async def ended(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self, _: float) -> None: ...

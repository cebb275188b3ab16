import asyncio
import contextlib
import math
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2

from router.app import RouterApp
from router.peers.peers import Peer, Peers
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.services import RouterSettings
from sluice.tiny_model import path
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import generation_pb2_grpc
from sluice.v1.admin_pb2_grpc import AdminServiceStub, ModelServiceStub
from tests.fakes.fake_ring import FakeRing


@dataclass
class Client:
    """A router, and the stubs of one channel to it."""

    router: RouterApp
    channel: grpc.aio.Channel
    logs: list[dict[str, Any]]

    def __post_init__(self):
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = ModelServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)

    def stream(self, spec: pb.GenerationSpec, **options):
        return self.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec), **options)

    async def events(self, spec: pb.GenerationSpec, **options) -> list[pb.GenerateStreamResponse]:
        return [event async for event in self.stream(spec, **options)]

    async def generate(self, spec: pb.GenerationSpec, **options) -> pb.GenerateResponse:
        return await self.generation.Generate(pb.GenerateRequest(spec=spec), **options)

    async def until_serving(self) -> None:
        await self.until(lambda: self.router.ring.membership.ready.is_set())

    @staticmethod
    async def until(condition, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the condition was still false after {seconds} s"
            await asyncio.sleep(0.005)

    def lines(self, event: str = "request_ended") -> list[dict[str, Any]]:
        return [line for line in self.logs if line["event"] == event]


@pytest.fixture
def folder():
    # Keep it short: the path of a Unix socket may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="sl") as folder:
        yield folder


@pytest.fixture
async def ring(folder, monkeypatch):
    ring = FakeRing(folder)
    lose_only_the_silent(ring, monkeypatch)
    # On a busy machine gRPC may report a disconnect late, and a failed send would look like a failure of the router.
    monkeypatch.setattr("router.errors.DISCONNECT_SECONDS", 60.0)
    # Refuse unknown adapters immediately, like a router that has been running for a while.
    monkeypatch.setattr("router.peers.learning.LEARN_SECONDS", 0.0)
    yield ring
    await ring.close()


def lose_only_the_silent(ring: FakeRing, monkeypatch) -> None:
    """Do not count a fake peer that sends heartbeats as lost because they are late: tests use timeouts of less than a
    second, and on a busy machine a thread of ZeroMQ may be delayed for longer."""
    is_silent, mark_stalled = Peer.is_silent, Peers.mark_stalled

    def is_silent_unless_beating(peer, now, timeout):
        return is_silent(peer, now, math.inf if ring.beats(peer.address) else timeout)

    def mark_stalled_unless_moving(peers, now):
        for peer in peers.all:
            if ring.moves(peer.address):
                peer.last_progress_at = now
        return mark_stalled(peers, now)

    monkeypatch.setattr(Peer, "is_silent", is_silent_unless_beating)
    monkeypatch.setattr(Peers, "mark_stalled", mark_stalled_unless_moving)


@pytest.fixture(scope="session")
def checkpoint():
    return open_checkpoint(str(path()), "tiny")


@pytest.fixture
async def start(ring, folder, checkpoint):
    """Starts routers on the fake ring, with settings by keyword, and waits for heartbeats of all peers."""
    tiny = checkpoint
    async with contextlib.AsyncExitStack() as stack:

        async def start(wait: bool = True, checkpoint=tiny, **settings) -> Client:
            settings = {
                "model": str(checkpoint.path),
                "engines": tuple(ring.engines),
                "detokenizers": tuple(ring.detokenizers),
                "listen": f"ipc://{folder}/router",
                "port": 0,
            } | settings
            logs: list[dict[str, Any]] = []

            def record(_, __, event):
                logs.append(event)
                raise structlog.DropEvent

            logger = structlog.wrap_logger(None, processors=[structlog.processors.format_exc_info, record])
            router = RouterApp(RouterSettings(**settings), checkpoint, logger)
            await router.start()
            ring.inboxes.append(router.ring.inbox)
            stack.push_async_callback(router.stop, 0.0)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{router.port}")
            stack.push_async_callback(channel.close)
            client = Client(router, channel, logs)
            if wait:
                members = router.ring.membership
                await client.until(lambda: len(members.engines.usable) == len(router.settings.engines))
                await client.until(lambda: len(members.detokenizers.usable) == len(router.settings.detokenizers))
            return client

        yield start


@pytest.fixture
async def client(ring, start) -> Client:
    """One engine, one detokenizer, one router."""
    ring.add_engine()
    ring.add_detokenizer()
    return await start()


@pytest.fixture
def quick_recovery(monkeypatch):
    """Detect losses and start the next attempt in a fraction of the usual time."""
    monkeypatch.setattr("router.peers.membership.WATCH_SECONDS", 0.02)
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.05)
    monkeypatch.setattr("router.requests.recovery.FIRST_BACKOFF_SECONDS", 0.002)
    monkeypatch.setattr("router.requests.recovery.LONGEST_BACKOFF_SECONDS", 0.01)


@pytest.fixture
async def two_of_each(ring, start):
    for name in ("a", "b"):
        ring.add_engine(name).moving = True
        ring.add_detokenizer(f"detok-{name}")
    return await start(peer_timeout=0.6, stall_timeout=0.4)


class Details:
    """google.rpc details of a failed call."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.error = error
        self.code = error.code()
        metadata = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
        details = {detail.TypeName(): detail for detail in status.details}
        self.info = self._unpack(details, error_details_pb2.ErrorInfo)
        self.bad = self._unpack(details, error_details_pb2.BadRequest)
        self.retry = self._unpack(details, error_details_pb2.RetryInfo)

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.bad.field_violations] if self.bad else []

    def _unpack(self, details, kind):
        detail = details.get(kind.DESCRIPTOR.full_name)
        if detail is None:
            return None
        message = kind()
        assert detail.Unpack(message)
        return message


async def refused(call) -> Details:
    """The details of a call (or of an iteration) that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return Details(error.value)


async def rest(call) -> list[pb.GenerateStreamResponse]:
    """The remaining events of a stream whose first events were read one by one."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def nothing_left(client: Client) -> bool:
    """Whether every request has ended in the router and the engines, and has released its resources."""
    router = client.router
    placement = router.ring.placement
    engines, streams = placement._engines.values(), placement._streams.values()
    return (
        not router.ring.requests.on_ring
        and not router.ring.requests.open
        and router.ring.admission.live == 0
        and not router.ring.dispatcher._recovery.waiting
        and not any(load.requests or load.sequences or load.context_tokens for load in engines)
        and not any(streams)
    )


def text_spec(text: str = "def f(x):", **fields) -> pb.GenerationSpec:
    return pb.GenerationSpec(text=text, **fields)

"""Silent streams and idle connections stay open, and clients may ping on them.

Times are a tenth of the real ones; gRPC's own default, five minutes between two pings, is as it is. Its clients ping
once a second at most.
"""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from router.api.listener import MIN_PING_MILLISECONDS, _options
from sluice.client import AsyncClient, connection
from sluice.settings.services import RouterSettings
from tests.fakes.http2 import Connection
from tests.fakes.ring_scripts import generate
from tests.router.conftest import Client, text_spec

pytestmark = pytest.mark.slow

PING_MILLISECONDS = 1000
SILENT_SECONDS = 6.0
"""With gRPC's default, a server closes the connection at the fourth ping, which is sent within this time."""
READY = grpc.ChannelConnectivity.READY


@pytest.fixture
async def begin(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    return start


def pinging(client, *options) -> grpc.aio.Channel:
    """A plain channel that pings as often as the documentation allows."""
    pings = [
        ("grpc.keepalive_time_ms", PING_MILLISECONDS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        *options,
    ]
    return grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", pings)


def test_clients_may_ping_every_ten_seconds_though_timers_are_not_exact() -> None:
    options = dict(_options(RouterSettings(model="m")))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == MIN_PING_MILLISECONDS <= 9_000
    assert dict(connection.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] >= 10_000


async def test_silent_streams_and_calls_and_idle_connections_stay_open(begin, ring, monkeypatch):
    async def after_silence(call) -> None:
        await call.send(start=True)
        await asyncio.sleep(SILENT_SECONDS)
        await generate(call)

    monkeypatch.setattr("router.api.listener.MIN_PING_MILLISECONDS", PING_MILLISECONDS // 2)
    fast = {"grpc.keepalive_time_ms": PING_MILLISECONDS, "grpc.use_local_subchannel_pool": 1}
    monkeypatch.setattr(connection, "CHANNEL_OPTIONS", tuple((dict(connection.CHANNEL_OPTIONS) | fast).items()))
    client = await begin()
    ring.script = after_silence
    async with (
        pinging(client) as channel,
        AsyncClient(f"127.0.0.1:{client.router.port}", resume_timeout=0) as own_client,
    ):
        plain = Client(client.router, channel, client.logs)
        stream = own_client.stream("x")
        events, answer, own_answer, _, _ = await asyncio.gather(
            plain.events(text_spec()),
            plain.generate(text_spec()),
            own_client.generate("x"),
            read(stream),
            stay_ready(client),
        )
    assert events[-1].done.usage.completion_tokens == 24
    assert answer.usage.completion_tokens == own_answer.usage.completion_tokens == 24
    assert (stream.usage.completion_tokens, stream.resumed) == (24, 0)


async def test_the_router_pings_connections_without_calls_too(begin, monkeypatch):
    """The pings detect connections whose peer has vanished."""
    monkeypatch.setattr("router.api.listener.KEEPALIVE_MILLISECONDS", 200)
    client = await begin()
    async with Connection(client.router.port) as idle:
        assert await asyncio.wait_for(idle.pings(3), 60) == 3


async def read(stream) -> None:
    async for _ in stream:
        pass


async def stay_ready(client) -> None:
    """Ping without calls, and check that the connection stays open."""
    async with pinging(client, ("grpc.keepalive_permit_without_calls", 1)) as channel:
        await HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert channel.get_state() is READY
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(READY), SILENT_SECONDS)

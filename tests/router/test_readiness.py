"""A router that was ready stays ready for a while without an engine or a detokenizer."""

import asyncio

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from router.readiness import Readiness
from sluice.v1 import admin_pb2
from tests.fakes.clock import Clock
from tests.router.conftest import text_spec

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_no_grace_before_it_was_ready():
    readiness = Readiness(30.0, Clock())
    assert readiness.update(complete=False) is None
    assert not readiness.ready


def test_it_stays_ready_for_the_grace_period():
    clock = Clock()
    readiness = Readiness(30.0, clock)
    assert readiness.update(complete=True) is None
    assert readiness.ready
    clock.now += 100
    assert readiness.update(complete=False) == 30.0
    clock.now += 29.9
    # Further updates with the same state do not prolong it.
    assert readiness.update(complete=False) is None
    assert readiness.ready
    clock.now += 0.2
    assert not readiness.ready
    assert readiness.update(complete=True) is None
    assert readiness.ready


def test_without_a_grace():
    readiness = Readiness(0.0, Clock())
    readiness.update(complete=True)
    readiness.update(complete=False)
    assert not readiness.ready


async def status(client) -> int:
    return (await HealthStub(client.channel).Check(health_pb2.HealthCheckRequest())).status


async def lose_the_engine(ring, start, **settings):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=0.4, **settings)
    watch = HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    engine.beating = False
    await client.until(lambda: not client.router.ring.membership.ready.is_set())
    return client, engine, watch


async def test_a_request_in_the_grace_waits_for_the_engine(ring, start):
    client, engine, _ = await lose_the_engine(ring, start, ready_grace=60.0)
    assert await status(client) == SERVING
    assert client.router.ring.not_ready_because() is None
    answer = asyncio.create_task(client.generate(text_spec()))
    await asyncio.sleep(0.1)
    assert not answer.done()
    engine.beating = True
    assert (await answer).usage.completion_tokens == 24
    assert await status(client) == SERVING


async def test_watchers_are_notified_when_the_grace_ends_even_without_a_heartbeat(ring, start):
    client, _, watch = await lose_the_engine(ring, start, ready_grace=1.5)
    for detokenizer in ring.detokenizers.values():
        detokenizer.beating = False
    assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
    expected = "no engine and no detokenizer accepts work"
    await client.until(lambda: client.router.ring.not_ready_because() == expected)


async def test_a_drain_ends_the_grace_immediately(ring, start):
    client, _, watch = await lose_the_engine(ring, start, ready_grace=60.0)
    await client.admin.Drain(admin_pb2.DrainRequest())
    assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
    assert client.router.ring.not_ready_because() == "it is draining"

"""New calls of a draining router's clients go elsewhere, and its open streams are completed."""

import asyncio
import json
import time
from collections import Counter

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from sluice import AsyncClient
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes.ring_scripts import generate
from tests.router.conftest import Details, rest, text_spec

RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
CALLS, CALLS_A_SECOND, DRAIN_AT = 200, 200, 60


async def one_token(call):
    await generate(call, most=1)


@pytest.fixture
async def two_routers(ring, start, folder):
    """Two routers, each with an admin port; one token is generated per request."""
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = one_token
    return [await start(listen=f"ipc://{folder}/{name}", admin_port=0, id=name) for name in ("first", "second")]


def name_of(two_routers) -> str:
    """A target name with the addresses of both routers."""
    return "ipv4:" + ",".join(f"127.0.0.1:{client.router.port}" for client in two_routers)


def admin_of(client):
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{client.router.admin_port}")
    return channel, AdminServiceStub(channel)


def hold(ring) -> asyncio.Event:
    """The next streams start, and are completed once the event is set."""
    may_continue = asyncio.Event()

    async def held(call):
        await call.send(start=True)
        await may_continue.wait()
        await generate(call)

    ring.script = held
    return may_continue


async def call_while_it_drains(call, router) -> Counter[str]:
    """Outcomes of `call` at a steady rate, while `router` begins to drain."""
    outcomes: Counter[str] = Counter()

    async def once() -> None:
        try:
            await call()
            outcomes["ok"] += 1
        except Exception as error:  # noqa: BLE001 - the test shows what it was
            outcomes[repr(error)] += 1

    begin, calls, drain = time.monotonic(), [], None
    for i in range(CALLS):
        await asyncio.sleep(max(0.0, begin + i / CALLS_A_SECOND - time.monotonic()))
        if i == DRAIN_AT:
            drain = asyncio.create_task(router.drain(60.0))
        calls.append(asyncio.create_task(once()))
    await asyncio.gather(*calls)
    assert drain is not None
    assert not drain.done()
    return outcomes


async def long_stream(stub, ring):
    may_continue = hold(ring)
    stream = stub.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
    assert (await stream.read()).HasField("started")
    ring.script = one_token
    return stream, may_continue


@pytest.mark.parametrize("policy", ["pick_first", "round_robin"])
async def test_grpcs_retries_hide_a_drain_and_a_long_stream_is_completed(two_routers, ring, policy):
    options = [("grpc.service_config", json.dumps(RETRIES | {"loadBalancingConfig": [{policy: {}}]}))]
    async with grpc.aio.insecure_channel(name_of(two_routers), options=options) as channel:
        stub = GenerationServiceStub(channel)
        stream, may_continue = await long_stream(stub, ring)
        (router,) = [client.router for client in two_routers if client.router.ring.requests.open]

        async def call() -> None:
            await stub.Generate(pb.GenerateRequest(spec=text_spec()))

        assert await call_while_it_drains(call, router) == {"ok": CALLS}
        may_continue.set()
        assert (await rest(stream))[-1].done.usage.completion_tokens == 24


@pytest.mark.parametrize("one_name", [False, True], ids=["two addresses", "one name"])
async def test_no_call_of_our_client_fails(two_routers, ring, one_name):
    addresses = (
        name_of(two_routers)
        if one_name
        else [f"127.0.0.1:{router_client.router.port}" for router_client in two_routers]
    )
    async with AsyncClient(addresses) as client:
        may_continue = hold(ring)
        stream = client.stream("long", max_tokens=24, token_ids=True)
        chunks = asyncio.create_task(collect(stream))
        await two_routers[0].until(lambda: ring.calls)
        ring.script = one_token
        (router,) = [router_client.router for router_client in two_routers if router_client.router.ring.requests.open]

        async def call() -> None:
            await client.generate("short", max_tokens=4)

        assert await call_while_it_drains(call, router) == {"ok": CALLS}
        may_continue.set()
        assert len(await chunks) == 24
        assert stream.resumed == 0


async def collect(stream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def test_a_stream_that_is_handed_back_resumes_at_the_other_router(two_routers, ring):
    async with AsyncClient(name_of(two_routers)) as client:
        hold(ring)
        stream = client.stream("long", max_tokens=24, token_ids=True)
        tokens = asyncio.create_task(collect(stream))
        await two_routers[0].until(lambda: ring.calls)
        (router,) = [router_client.router for router_client in two_routers if router_client.router.ring.requests.open]
        ring.script = generate
        assert await router.drain(0.2) == 1
        assert len(await asyncio.wait_for(tokens, 60)) == 24
        assert stream.resumed == 1


async def test_health_watchers_are_notified_before_calls_are_refused(two_routers, monkeypatch):
    first, _ = two_routers
    monkeypatch.setattr("router.app.NOTICE_SECONDS", 10.0)
    watch = HealthStub(first.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    drain = asyncio.create_task(first.router.drain(60.0))
    assert (await asyncio.wait_for(watch.read(), 60)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert first.router.ring.not_ready_because() == "it is draining"
    assert (await first.generate(text_spec())).outputs
    assert await drain == 0
    with pytest.raises(grpc.aio.AioRpcError, match="Connection refused"):
        await first.generate(text_spec())


async def test_the_admin_port_answers_until_the_end(two_routers, ring):
    first, _ = two_routers
    channel, admin = admin_of(first)
    async with channel:
        stream, may_continue = await long_stream(first.generation, ring)
        drain = asyncio.ensure_future(admin.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=60))))
        await first.until(lambda: first.router.ring.requests.closed)
        assert (await admin.GetServerInfo(admin_pb2.GetServerInfoRequest())).draining
        with pytest.raises(grpc.aio.AioRpcError, match="Connection refused"):
            await first.generate(text_spec())
        assert not drain.done()
        may_continue.set()
        assert (await rest(stream))[-1].HasField("done")
        assert (await drain).aborted == 0
        # A drained router keeps running until it gets a signal.
        assert not any(task.done() for task in first.router.tasks)
        assert (await admin.GetServerInfo(admin_pb2.GetServerInfoRequest())).draining


async def test_a_drain_called_on_the_main_port_is_answered(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    stream, may_continue = await long_stream(client.generation, ring)
    drain = client.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=60)))
    await client.until(lambda: client.router.ring.draining)
    may_continue.set()
    assert (await rest(stream))[-1].HasField("done")
    assert (await drain).aborted == 0


async def test_a_drain_called_on_the_main_port_continues_without_its_caller(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    stream, may_continue = await long_stream(client.generation, ring)
    drain = client.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=60)))
    await client.until(lambda: client.router.ring.draining)
    drain.cancel()
    may_continue.set()
    assert (await rest(stream))[-1].HasField("done")
    await asyncio.sleep(0)
    assert not any(task.done() for task in client.router.tasks)
    await asyncio.wait_for(client.router.stop(0.0), 60)


async def test_a_drain_whose_caller_has_disconnected_hands_late_streams_back(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    stream, _ = await long_stream(client.generation, ring)
    drain = client.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=1)))
    await client.until(lambda: client.router.ring.draining)
    drain.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as ending:
        await asyncio.wait_for(rest(stream), 60)
    assert Details(ending.value).info.reason == "DRAINING"

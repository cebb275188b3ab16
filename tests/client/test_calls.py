"""The endless streams of statistics and KV cache events, and other calls of AdminService."""

import threading

import grpc
import pytest

from sluice.client import AsyncClient, Client, DeadlineExceeded, Unavailable
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure

LIMIT = 60
STEPS = [
    admin_pb2.StreamStepsResponse(steps=[admin_pb2.EngineStats(engine_id="e", iteration=iteration)])
    for iteration in (1, 2)
]


def test_steps_are_received_until_closed(script, address) -> None:
    script.steps = STEPS
    with Client(address) as client, client.stream_steps() as steps:
        assert [next(steps), next(steps)] == STEPS
        threading.Timer(0.1, steps.close).start()
        assert list(steps) == []
    assert script.gone.wait(LIMIT)


async def test_steps_are_received_until_closed_async(script, address) -> None:
    script.steps = STEPS
    async with AsyncClient(address) as client, client.stream_steps() as steps:
        await steps.started()
        assert [await anext(steps), await anext(steps)] == STEPS
        steps.close()
        assert [step async for step in steps] == []
    assert script.gone.wait(LIMIT)


def events_of(*numbers: int, engine: str = "e", epoch: int = 1) -> admin_pb2.StreamCacheEventsResponse:
    events = [admin_pb2.CacheEvent(event_id=number) for number in numbers]
    return admin_pb2.StreamCacheEventsResponse(engine_id=engine, engine_epoch=epoch, events=events)


async def test_cache_events(script, address) -> None:
    script.cache_events = [events_of(0, 1), events_of(2)]
    with Client(address) as client, client.stream_cache_events("e") as events:
        assert [next(events), next(events)] == script.cache_events
    assert script.seen[-1].engine_id == "e"
    async with AsyncClient(address) as client, client.stream_cache_events() as events:
        assert [await anext(events), await anext(events)] == script.cache_events
    assert script.seen[-1].engine_id == ""


def test_a_deleted_stream_ends_at_the_server(script, address) -> None:
    with Client(address) as client:
        client.stream_steps()
        assert script.gone.wait(LIMIT)


async def test_errors_are_typed(script, address) -> None:
    with Client(address, timeout=0.001) as client:
        with pytest.raises(DeadlineExceeded, match=r"within its timeout of 0\.2 s"):
            next(client.stream_steps(timeout=0.2))
        script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable):
            next(client.stream_steps())
    async with AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            await anext(client.stream_steps())


INFO = admin_pb2.GetServerInfoResponse(
    router_id="r", engines=[admin_pb2.EngineInfo(engine_id="e", state=admin_pb2.PEER_STATE_LOST)]
)


def test_server_info(script, address) -> None:
    script.info = INFO
    with Client(address) as client:
        assert client.server_info() == INFO


async def test_server_info_async(script, address) -> None:
    script.info = INFO
    async with AsyncClient(address) as client:
        assert await client.server_info() == INFO

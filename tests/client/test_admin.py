"""Calls of AdminService: endless streams, calls of engine methods, and the model version in service."""

import threading

import grpc
import pytest

from sluice.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RankAnswer,
    ServingVersion,
    Unavailable,
)
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure, bad_request
from tests.fakes.server import serve
from tests.fakes.server_script import Script

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


ANSWERS = [
    admin_pb2.RankAnswer(engine_id="e0", rank=0, value_json='{"a": [1, null]}'),
    admin_pb2.RankAnswer(engine_id="e0", rank=1, error="e0, rank 1, m: no"),
    admin_pb2.RankAnswer(engine_id="e1", error="e1, m: lost"),
]
READ = [
    RankAnswer("e0", 0, {"a": [1, None]}),
    RankAnswer("e0", 1, error="e0, rank 1, m: no"),
    RankAnswer("e1", None, error="e1, m: lost"),
]


def test_arguments_and_answers(script, address) -> None:
    script.rank_answers = ANSWERS
    with Client(address) as client:
        assert client.call_engines("m", [1, "é"], {"k": None}, ranks=[0, 2], timeout=1.5) == READ
        client.call_engines("m")
    full, bare = script.seen
    assert full == admin_pb2.CallEnginesRequest(
        method="m",
        args_json='[1, "\\u00e9"]',
        kwargs_json='{"k": null}',
        ranks=[0, 2],
        timeout={"seconds": 1, "nanos": 500_000_000},
    )
    assert bare == admin_pb2.CallEnginesRequest(method="m", args_json="[]", kwargs_json="{}")


async def test_arguments_and_answers_async(script, address) -> None:
    script.rank_answers = ANSWERS
    async with AsyncClient(address) as client:
        assert await client.call_engines("m", (1,)) == READ


def test_invalid_arguments(address) -> None:
    with Client(address) as client:
        for args in ([{1}], [b"x"], "text"):
            with pytest.raises(TypeError):
                client.call_engines("m", args)
        with pytest.raises(ValueError, match="not JSON compliant"):
            client.call_engines("m", [float("nan")])
        with pytest.raises(ValueError, match="ranks is empty"):
            client.call_engines("m", ranks=[])
        with pytest.raises(ValueError, match=r"at least 0 \(got -1\)"):
            client.call_engines("m", ranks=[-1])


async def test_a_failed_call_is_not_retried(script, address) -> None:
    """It is not retried even if `generate` would try the next router. The next call uses that router."""
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
    with serve(script) as second_address:
        with Client([address, second_address], retry_timeout=10) as client:
            router_before = client._routers.current
            with pytest.raises(Unavailable):
                client.call_engines("m")
            assert client._routers.current is not router_before
        assert len(script.seen) == 1
        async with AsyncClient([address, second_address], retry_timeout=10) as client:
            with pytest.raises(Unavailable):
                await client.call_engines("m")
        assert len(script.seen) == 2


def test_a_refused_call_stays_at_its_router(script, address) -> None:
    script.failure = bad_request("method", "is '', must not be empty")
    with Client([address, address]) as client:
        router_before = client._routers.current
        with pytest.raises(InvalidRequest) as error:
            client.call_engines("")
        assert error.value.violations[0].field == "method"
        assert client._routers.current is router_before


@pytest.fixture
def second():
    return Script(info=admin_pb2.GetServerInfoResponse(serving_version="v1", serving_engines=3))


def expected(both) -> list[ServingVersion]:
    first, second = both
    return [ServingVersion(first, "v2", 0, former=""), ServingVersion(second, "v2", 3, former="v1")]


def test_every_router_changes(both, script, second) -> None:
    with Client(both) as client:
        assert client.set_serving_version("v2") == expected(both)
        assert [result.version for result in client.serving_versions()] == ["v2", "v2"]
        assert [(result.version, result.former) for result in client.set_serving_version("")] == [
            ("", "v2"),
            ("", "v2"),
        ]
    assert script.seen == second.seen
    assert script.seen[0] == admin_pb2.SetServingVersionRequest(version="v2")


async def test_every_router_changes_async(both) -> None:
    async with AsyncClient(both) as client:
        assert await client.set_serving_version("v2") == expected(both)
        assert [result.version for result in await client.serving_versions()] == ["v2", "v2"]


async def test_every_router_answers(both) -> None:
    expected_versions = [ServingVersion(both[0]), ServingVersion(both[1], "v1", 3)]
    with Client(both) as client:
        assert client.serving_versions() == expected_versions
    async with AsyncClient(both) as client:
        assert await client.serving_versions() == expected_versions


async def test_a_failure_of_one_router_is_in_its_result(both, script, second) -> None:
    """Calls are not retried."""
    script.failure = Failure(grpc.StatusCode.NOT_FOUND, "version is 'v2'")
    with Client(both, retry_timeout=10) as client:
        refused, changed = client.set_serving_version("v2")
    assert isinstance(refused.error, ModelNotFound)
    assert (refused.address, refused.version, refused.former) == (both[0], "", None)
    assert changed == expected(both)[1]
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
    async with AsyncClient(both, retry_timeout=10) as async_client:
        refused, changed = await async_client.set_serving_version("v3")
        unreachable, _ = await async_client.serving_versions()
    assert isinstance(refused.error, Unavailable)
    assert isinstance(unreachable.error, Unavailable)
    assert changed.version == "v3"
    assert (len(script.seen), len(second.seen)) == (3, 3)


def test_nothing_is_raised_if_all_routers_failed(script, address) -> None:
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
    with Client(address) as client:
        (result,) = client.set_serving_version("v2")
    assert isinstance(result.error, Unavailable)

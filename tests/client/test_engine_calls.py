"""Calls of engine methods: their arguments, their answers, and that they are not retried."""

import grpc
import pytest

from sluice.client import AsyncClient, Client, InvalidRequest, RankAnswer, Unavailable
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure, bad_request
from tests.fakes.server import serve

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

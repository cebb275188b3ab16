"""The model version in service: read and set at every router, with one result for each."""

import grpc
import pytest

from sluice.client import AsyncClient, Client, ModelNotFound, ServingVersion, Unavailable
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.server_script import Script


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

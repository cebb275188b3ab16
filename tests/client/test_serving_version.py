"""The model version in service: read and set at every router, with one result for each."""

import grpc
import pytest

from sluice.client import AsyncClient, Client, ModelNotFound, ServingVersion, Unavailable
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.server import serve
from tests.fakes.server_script import Script


@pytest.fixture
def second():
    return Script(info=admin_pb2.GetServerInfoResponse(serving_version="v1", serving_engines=3))


@pytest.fixture
def addresses(address, second):
    with serve(second) as second_address:
        yield [address, second_address]


def expected(addresses) -> list[ServingVersion]:
    first, second = addresses
    return [ServingVersion(first, "v2", 0, former=""), ServingVersion(second, "v2", 3, former="v1")]


def test_every_router_changes(addresses, script, second) -> None:
    with Client(addresses) as client:
        assert client.set_serving_version("v2") == expected(addresses)
        assert [result.version for result in client.serving_versions()] == ["v2", "v2"]
        assert [(result.version, result.former) for result in client.set_serving_version("")] == [
            ("", "v2"),
            ("", "v2"),
        ]
    assert script.seen == second.seen
    assert script.seen[0] == admin_pb2.SetServingVersionRequest(version="v2")


async def test_every_router_changes_async(addresses) -> None:
    async with AsyncClient(addresses) as client:
        assert await client.set_serving_version("v2") == expected(addresses)
        assert [result.version for result in await client.serving_versions()] == ["v2", "v2"]


async def test_every_router_answers(addresses) -> None:
    expected_versions = [ServingVersion(addresses[0]), ServingVersion(addresses[1], "v1", 3)]
    with Client(addresses) as client:
        assert client.serving_versions() == expected_versions
    async with AsyncClient(addresses) as client:
        assert await client.serving_versions() == expected_versions


async def test_a_failure_of_one_router_is_in_its_result(addresses, script, second) -> None:
    """Calls are not retried."""
    script.failure = Failure(grpc.StatusCode.NOT_FOUND, "version is 'v2'")
    with Client(addresses, retry_timeout=10) as client:
        refused, changed = client.set_serving_version("v2")
    assert isinstance(refused.error, ModelNotFound)
    assert (refused.address, refused.version, refused.former) == (addresses[0], "", None)
    assert changed == expected(addresses)[1]
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
    async with AsyncClient(addresses, retry_timeout=10) as async_client:
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

"""Calls and streams that no router has accepted yet: at which routers, and for how long, they are retried."""

import asyncio
import threading
import time

import grpc
import pytest

from sluice import AsyncClient, Client
from sluice.client import AlreadyExists, Cancelled, Overloaded, Unavailable
from tests.fakes.breaking_routers import GONE, Plan, bare, run_router, with_reason
from tests.fakes.http2 import dying_router

CODE = grpc.StatusCode
LIMIT = 60


async def test_an_unreachable_address_is_skipped(plan, addresses) -> None:
    for _ in range(4):
        with Client(["127.0.0.1:1", addresses[0]]) as client:
            assert list(client.stream("p"))
            assert client.generate("p").text == "served by 0"
        async with AsyncClient(["127.0.0.1:1", addresses[0]]) as client:
            assert [chunk async for chunk in client.stream("p")]
            assert (await client.generate("p")).text == "served by 0"


async def test_each_address_is_tried_once_before_a_request_is_accepted(plan, addresses) -> None:
    no_engine = with_reason(CODE.UNAVAILABLE, "NO_ENGINE", 0.01)
    for call in (lambda client: list(client.stream("p")), lambda client: client.generate("p")):
        plan.seen.clear()
        plan.breaks.extend([(0, no_engine)] * 2)
        with Client(addresses) as client, pytest.raises(Unavailable) as caught:
            call(client)
        assert caught.value.reason == "NO_ENGINE"
        assert sorted(number for number, _ in plan.seen) == [0, 1]
        plan.breaks.append((0, with_reason(CODE.RESOURCE_EXHAUSTED, "OVERLOADED", 0.01)))
        with Client(addresses) as client, pytest.raises(Overloaded):
            call(client)
        plan.breaks.append((0, with_reason(CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST")))
        with Client(addresses, retry_timeout=LIMIT) as client, pytest.raises(AlreadyExists):
            call(client)
        assert len(plan.seen) == 4


async def test_calls_wait_while_the_only_router_restarts(plan, addresses) -> None:
    """With default options, calls wait for a router that has answered before."""
    address = addresses[0]
    with Client(address) as client:
        assert client.generate("p").text == "served by 0"
        plan.breaks.extend([(0, GONE)] * 2)
        assert client.generate("p").text == "served by 0"
        plan.breaks.extend([(0, GONE)] * 2)
        assert list(client.stream("p"))
    async with AsyncClient(address) as client:
        assert (await client.generate("p")).text == "served by 0"
        plan.breaks.extend([(0, GONE)] * 2)
        assert (await client.generate("p")).text == "served by 0"
        plan.breaks.extend([(0, GONE)] * 2)
        assert [chunk async for chunk in client.stream("p")]
    assert not plan.breaks


async def test_the_first_call_is_retried_if_its_connection_was_established() -> None:
    """The only router dies before the first event, and the next one is not there at once."""
    plan = Plan()
    with run_router(0, plan) as (target, _):
        async with dying_router(target) as address:
            with Client(address) as client:
                stream = client.stream("p", request_id="mine")
                assert await asyncio.to_thread(list, stream)
                assert (stream.request_id, stream.resumed) == ("mine", 0)
        async with dying_router(target) as address, AsyncClient(address) as client:
            assert [chunk async for chunk in client.stream("p")]
        async with dying_router(target) as address, AsyncClient(address) as client:
            assert (await client.generate("p")).text == "served by 0"
        async with dying_router(target) as address, AsyncClient(address, resume_timeout=0) as client:
            with pytest.raises(Unavailable):
                await client.generate("p")
    assert len(plan.seen) == 3


@pytest.mark.parametrize("routers", [1, 2])
async def test_a_call_that_grpc_cancels_is_retried(plan, addresses, routers) -> None:
    """gRPC cancels calls that exceed its queue for a server."""
    cancelled = [(0, bare(CODE.CANCELLED, ""))]
    with Client(addresses[:routers], retry_timeout=LIMIT) as client:
        plan.breaks.extend(cancelled * 3)
        assert client.generate("p").text.startswith("served")
        plan.breaks.extend(cancelled * 3)
        assert list(client.stream("p"))
    async with AsyncClient(addresses[:routers], retry_timeout=LIMIT) as client:
        plan.breaks.extend(cancelled * 3)
        assert (await client.generate("p")).text.startswith("served")
        plan.breaks.extend(cancelled * 3)
        assert [chunk async for chunk in client.stream("p")]
    assert not plan.breaks


async def test_a_call_that_the_client_cancels_is_not_retried(plan, addresses) -> None:
    entered = threading.Event()

    def wait(context) -> None:
        entered.set()
        while context.is_active():
            time.sleep(0.005)

    plan.breaks.append((0, wait))
    client = AsyncClient(addresses, retry_timeout=LIMIT)
    call = asyncio.ensure_future(client.generate("p"))
    assert await asyncio.to_thread(entered.wait, LIMIT)
    await client.close()
    with pytest.raises(Cancelled):
        await call
    assert len(plan.seen) == 1


async def test_retry_timeout(plan, addresses) -> None:
    busy = [(0, with_reason(CODE.RESOURCE_EXHAUSTED, "OVERLOADED", 0.05))] * 3
    busy += [(0, with_reason(CODE.UNAVAILABLE, "NO_ENGINE", 0.05))] * 3
    plan.breaks.extend(busy * 2)
    with Client(addresses, retry_timeout=LIMIT) as client:
        stream = client.stream("p")
        assert list(stream)
        assert stream.resumed == 0
        assert client.generate("p").text.startswith("served")
    plan.breaks.extend(busy * 2)
    async with AsyncClient(addresses, retry_timeout=LIMIT) as client:
        assert [chunk async for chunk in client.stream("p")]
        assert (await client.generate("p")).text.startswith("served")
    assert not plan.breaks


async def test_abort_reaches_the_router_of_the_request(plan, addresses) -> None:
    with Client([*addresses, "127.0.0.1:1"]) as client:
        assert client.abort("lives at 0")
        assert client.abort("lives at 1")
        assert not client.abort("lives nowhere")
    async with AsyncClient([*addresses, "127.0.0.1:1"]) as client:
        assert await client.abort("lives at 1")
        assert not await client.abort("lives nowhere")
    with Client(["127.0.0.1:1", "127.0.0.1:2"]) as client, pytest.raises(Unavailable):
        client.abort("r")

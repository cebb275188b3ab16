"""Both clients with routers that fail during a stream: the caller sees one uninterrupted stream."""

import asyncio
import threading
import time

import grpc
import pytest

from sluice import AsyncClient, Client
from sluice.client import (
    Cancelled,
    Chunk,
    DeadlineExceeded,
    LostEvents,
    ModelChanged,
    Overloaded,
    Poison,
    ServerError,
    Unavailable,
)
from sluice.v1 import generation_pb2 as pb
from tests.client.joined import join
from tests.fakes.breaking_routers import GONE, Plan, bare, run_router, run_routers, with_reason
from tests.fakes.story import MODEL

OPTIONS = {"n": 2, "max_tokens": 5, "logprobs": 0, "stop": "!!", "temperature": 1.0}
CODE = grpc.StatusCode
LIMIT = 60
BREAKS = {
    "socket": GONE,
    "draining": with_reason(CODE.UNAVAILABLE, "DRAINING", 0.05),
    "engine": with_reason(CODE.UNAVAILABLE, "ENGINE_LOST", 0.05),
    "removed": bare(CODE.UNKNOWN, "Stream removed"),
    "reset": bare(CODE.INTERNAL, "Received RST_STREAM with error code 2"),
    "cancelled by the router": bare(CODE.CANCELLED, "CANCELLED"),
    "just ended": None,
}


def stream_without_breaks(addresses: list[str]) -> list[Chunk]:
    with Client(addresses) as client:
        return list(client.stream("p", **OPTIONS))


def num_resumed_tokens(spec: pb.GenerationSpec) -> int:
    return sum(len(resume_from.token_ids) for resume_from in spec.resume)


@pytest.mark.parametrize("routers", [1, 2])
async def test_a_break_at_every_event(plan, addresses, routers) -> None:
    expected, addresses, resumed = join(stream_without_breaks(addresses)), addresses[:routers], []
    with Client(addresses) as client:
        for num_events in range(1, 14):
            plan.breaks.append((num_events, GONE))
            stream = client.stream("p", **OPTIONS)
            assert join(stream) == expected
            assert stream.usage.completion_tokens == 11
            resumed.append(stream.resumed)
    # If only the usage is missing, or nothing, there is nothing to resume.
    assert resumed == sorted(resumed, reverse=True)
    assert 6 <= sum(resumed) < len(resumed)
    async with AsyncClient(addresses) as client:
        for num_events in (1, 2, 4, 6):
            plan.breaks.append((num_events, GONE))
            async_stream = client.stream("p", **OPTIONS)
            assert join([chunk async for chunk in async_stream]) == expected
            assert async_stream.resumed == 1


async def test_a_break_does_not_change_the_collected_result(plan, addresses) -> None:
    outputs = join(stream_without_breaks(addresses))
    with Client(addresses) as client:
        expected = client.stream("p", **OPTIONS).collect()
        assert [output.text for output in expected.outputs] == [outputs[index].text for index in sorted(outputs)]
        assert [output.token_ids for output in expected.outputs] == [
            outputs[index].token_ids for index in sorted(outputs)
        ]
        assert expected.usage.completion_tokens == 11
        for num_events in (1, 3, 5):
            plan.breaks.append((num_events, GONE))
            assert client.stream("p", **OPTIONS).collect() == expected
    async with AsyncClient(addresses) as client:
        plan.breaks.append((4, GONE))
        assert await client.stream("p", **OPTIONS).collect() == expected
    assert sum(bool(spec.resume) for _, spec in plan.seen) >= 3


@pytest.mark.parametrize("error_name", BREAKS)
async def test_every_kind_of_break(plan, addresses, error_name) -> None:
    expected = join(stream_without_breaks(addresses))
    plan.breaks.extend([(3, BREAKS[error_name]), (3, BREAKS[error_name])])
    with Client(addresses) as client:
        stream = client.stream("p", **OPTIONS)
        assert join(stream) == expected
        assert stream.resumed == 2
        assert stream.usage.completion_tokens == 11
    (_, first), (_, second), (_, third) = plan.seen[-3:]
    assert (second.request_id, second.sampling.seed) == (stream.request_id, stream.seed)
    assert not first.resume
    assert 0 < num_resumed_tokens(second) < num_resumed_tokens(third)
    assert {resume_from.model_fingerprint for spec in (second, third) for resume_from in spec.resume} == {MODEL}
    plan.breaks.append((3, BREAKS[error_name]))
    async with AsyncClient(addresses) as client:
        assert join([chunk async for chunk in client.stream("p", **OPTIONS)]) == expected


ENGINE_DIED = with_reason(CODE.UNAVAILABLE, "ENGINE_LOST", 0.05, engine_deaths="1")
POISON = with_reason(CODE.INTERNAL, "POISON", engine_deaths="2")


@pytest.mark.parametrize("unary", [False, True])
async def test_the_number_of_engine_deaths_is_sent_to_the_next_router(plan, addresses, unary) -> None:
    for aio in (False, True):
        plan.seen.clear()
        plan.breaks.extend([(1, ENGINE_DIED), (1, GONE), (1, POISON)])
        with pytest.raises(Poison) as caught:
            await (run_request_async(addresses, unary) if aio else asyncio.to_thread(run_request, addresses, unary))
        assert caught.value.engine_deaths == 2
        assert [spec.engine_deaths for _, spec in plan.seen] == [0, 1, 1]


def run_request(addresses: list[str], unary: bool) -> None:
    with Client(addresses) as client:
        if unary:
            client.generate("p", **OPTIONS)
        else:
            list(client.stream("p", **OPTIONS))


async def run_request_async(addresses: list[str], unary: bool) -> None:
    async with AsyncClient(addresses) as client:
        if unary:
            await client.generate("p", **OPTIONS)
        else:
            [chunk async for chunk in client.stream("p", **OPTIONS)]


def test_progress_resets_the_number_of_engine_deaths(plan, addresses) -> None:
    plan.breaks.extend([(1, ENGINE_DIED), (5, GONE)])
    with Client(addresses) as client:
        assert join(client.stream("p", **OPTIONS))
    assert [spec.engine_deaths for _, spec in plan.seen] == [0, 1, 0]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (with_reason(CODE.INTERNAL, "STEP_FAILED"), ServerError),
        (POISON, Poison),
        (with_reason(CODE.RESOURCE_EXHAUSTED, "SLOW_CLIENT"), Overloaded),
        (bare(CODE.UNKNOWN, "Exception calling application"), ServerError),
        (bare(CODE.ABORTED, "no"), ServerError),
        (with_reason(CODE.FAILED_PRECONDITION, "MODEL_CHANGED"), ModelChanged),
    ],
)
def test_errors_that_are_not_retried_at_other_routers(plan, addresses, failure, kind) -> None:
    plan.breaks.append((3, failure))
    with Client(addresses) as client, pytest.raises(kind) as caught:
        list(client.stream("p", **OPTIONS))
    assert type(caught.value) is kind
    assert len(plan.seen) == 1


async def test_a_stream_resumes_after_temporary_errors_of_the_next_router(plan, addresses) -> None:
    """The previous router may not have noticed the break, or too many clients may arrive at the same time."""
    expected = join(stream_without_breaks(addresses))
    refusals = [
        (0, with_reason(CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST")),
        (0, with_reason(CODE.RESOURCE_EXHAUSTED, "OVERLOADED", 0.05)),
        (0, with_reason(CODE.UNAVAILABLE, "NO_ENGINE", 0.05)),
    ]
    plan.breaks.extend([(3, GONE), *refusals])
    with Client(addresses) as client:
        stream = client.stream("p", **OPTIONS)
        assert join(stream) == expected
        assert stream.resumed == 1
    plan.breaks.extend([(3, GONE), *refusals])
    async with AsyncClient(addresses) as client:
        assert join([chunk async for chunk in client.stream("p", **OPTIONS)]) == expected


async def test_the_resume_timeout_counts_from_the_latest_token(plan, addresses) -> None:
    plan.breaks.extend([(3, GONE)] + [(1, GONE)] * 100)
    with Client(addresses, resume_timeout=0.5) as client, pytest.raises(Unavailable, match="Socket closed"):
        list(client.stream("p", **OPTIONS))
    assert 1 < len(plan.seen) < 50
    async with AsyncClient(addresses, resume_timeout=0.5) as client:
        with pytest.raises(Unavailable, match="Socket closed"):
            _ = [chunk async for chunk in client.stream("p", **OPTIONS)]


async def test_the_timeout_limits_all_attempts_together(plan, addresses) -> None:
    plan.breaks.extend([(3, GONE)] + [(1, GONE)] * 1000)
    began = time.monotonic()
    seconds = "within its timeout of 0.4 s"
    with Client(addresses, timeout=0.4) as client, pytest.raises(DeadlineExceeded, match=seconds):
        list(client.stream("p", **OPTIONS))
    async with AsyncClient(addresses) as client:
        with pytest.raises(DeadlineExceeded, match=seconds):
            _ = [chunk async for chunk in client.stream("p", timeout=0.4, **OPTIONS)]
    assert time.monotonic() - began > 0.8


def test_resuming_can_be_turned_off(plan, addresses) -> None:
    plan.breaks.append((3, GONE))
    with Client(addresses, resume_timeout=0) as client, pytest.raises(Unavailable):
        list(client.stream("p", **OPTIONS))
    plan.breaks.append((3, None))
    with Client(addresses, resume_timeout=0) as client, pytest.raises(LostEvents):
        list(client.stream("p", **OPTIONS))
    assert len(plan.seen) == 2


async def test_a_router_that_stops_during_a_stream(plan) -> None:
    """The connection breaks, and the address of the current router does not answer any more."""
    with run_router(0, plan) as (first, doomed), run_router(1, plan) as (second, _):
        expected = join(stream_without_breaks([second]))

        def stop_the_server(_) -> None:
            doomed.stop(None).wait(LIMIT)
            threading.Event().wait(0.1)

        plan.breaks.append((4, stop_the_server))
        with Client([first, second]) as client:
            while client.addresses[0] != client._routers.current.address:
                client._routers.skip(client._routers.current)
            stream = client.stream("p", **OPTIONS)
            assert join(stream) == expected
            assert stream.resumed == 1
            assert [number for number, _ in plan.seen[-2:]] == [0, 1]
            # The client keeps the router that works.
            assert join(client.stream("p", **OPTIONS)) == expected
            assert len(plan.seen) == 4


async def test_closing_a_stream_between_attempts(plan, addresses) -> None:
    breaks_without_end = [(3, GONE)] + [(0, with_reason(CODE.RESOURCE_EXHAUSTED, "OVERLOADED", 0.3))] * 1000
    plan.breaks.extend(breaks_without_end)
    with Client(addresses) as client:
        stream = client.stream("p", **OPTIONS)
        assert next(stream)
        threading.Timer(0.1, stream.close).start()
        list(stream)
        closed_with_client = client.stream("p", **OPTIONS)
    with pytest.raises(Cancelled):
        list(closed_with_client)
    # Separate routers, because a late call of the streams above could use up a break.
    second_plan = Plan()
    second_plan.breaks.extend(breaks_without_end)
    with run_routers(2, second_plan) as addresses:
        async with AsyncClient(addresses) as client:
            async_stream = client.stream("p", **OPTIONS)
            assert await anext(async_stream)
            asyncio.get_running_loop().call_later(0.1, async_stream.close)
            async for _ in async_stream:
                pass


def test_invalid_addresses_and_options() -> None:
    with pytest.raises(ValueError, match="addresses is empty"):
        Client([])
    with pytest.raises(TypeError, match="adress"):
        Client("a:1", adress="b")
    with pytest.raises(ValueError, match="token"):
        Client("a:1", token="two words")
    with pytest.raises(ValueError, match="address 'a' has no port"):
        Client("a")
    with pytest.raises(ValueError, match="address 'http://a:1' is a URL"):
        Client(["b:1", "http://a:1"])

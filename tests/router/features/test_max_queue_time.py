"""A request that no engine begins in time fails, wherever it waits. One that has begun runs on."""

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from tests.fakes.ring_scripts import generate, hang
from tests.router.conftest import refused, text_spec

LIMIT = Duration(nanos=200_000_000)


async def silent(call) -> None:
    """The engine keeps the request waiting: it sends nothing."""
    await call.stopped.wait()


async def waits_in_the_engine(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = silent
    return await start(), None


async def waits_for_admission(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1)
    running = client.stream(text_spec())
    assert (await running.read()).HasField("started")
    return client, running


async def waits_for_an_engine(_, start):
    return await start(), None


@pytest.mark.parametrize("waits", [waits_in_the_engine, waits_for_admission, waits_for_an_engine])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_that_waits_longer_fails_and_leaves_nothing(ring, start, waits, streaming):
    # The call is kept, since gRPC cancels a call that is garbage.
    client, running = await waits(ring, start)
    before = len(client.router.ring.requests.open)
    spec = text_spec(max_queue_time=LIMIT)
    details = await refused(client.events(spec) if streaming else client.generate(spec))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert "within spec.max_queue_time, which is 0.2 s" in details.error.details()
    assert len(client.router.ring.requests.open) == before == (running is not None)


async def test_a_request_that_has_begun_runs_on(ring, client):
    ring.script = lambda call: generate(call, pause=0.05, most=10)
    events = await client.events(text_spec(max_queue_time=LIMIT))
    assert events[-1].HasField("done")


async def test_a_stream_that_is_resumed_began_earlier(ring, client):
    ring.script = silent
    resumed = [pb.ResumeFrom(token_ids=[1, 2])]
    call = client.stream(text_spec(max_queue_time=LIMIT, resume=resumed, sampling={"seed": 1}))
    await asyncio.sleep(0.4)
    assert not call.done()
    call.cancel()

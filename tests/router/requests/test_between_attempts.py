"""Between two attempts a stream may be aborted, time out, lose its client, be drained, or find no peer."""

import asyncio
import contextlib

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from tests.router.conftest import nothing_left, refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

pytestmark = pytest.mark.usefixtures("quick_recovery")


async def test_with_a_single_engine_a_stream_waits_for_its_restart(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=0.3, recovery_timeout=20)
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(n=2, output=IDS)))
    await script.reached.wait()
    engine.beating = False
    await client.until(lambda: client.lines("attempt_given_up"))
    await asyncio.sleep(0.3)
    assert not task.done()
    assert client.router.ring.admission.live == 1
    engine.epoch += 1
    engine.beating = True
    check_whole(await task, script.attempts[0].submit, 2)
    await client.until(lambda: nothing_left(client))


@pytest.mark.parametrize("streaming", [True, False])
async def test_no_peer_returns_in_time(ring, start, streaming):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=0.3, recovery_timeout=0.2)
    ring.script = script = Script(midway)
    spec = text_spec()
    task = asyncio.ensure_future(client.events(spec) if streaming else client.generate(spec))
    await script.reached.wait()
    engine.beating = False
    details = await refused(task)
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert details.retry is not None
    await client.until(lambda: nothing_left(client))


async def lone_stream_without_engine(ring, start, **fields):
    """A stream between two attempts, without an engine that could continue it."""
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=0.3)
    ring.script = script = Script(midway)
    call = client.stream(text_spec(output=IDS, **fields))
    events = []

    async def read():
        async for event in call:
            events.append(event)
        return events

    task = asyncio.ensure_future(read())
    await script.reached.wait()
    engine.beating = False
    await client.until(lambda: client.router.ring.dispatcher._recovery.waiting and len(events) >= 2)
    return client, call, task


async def test_abort_between_attempts_ends_immediately(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start, request_id="r", n=2)
    assert (await client.generation.Abort(pb.AbortRequest(request_id="r"))).aborted
    events = await task
    assert [event.finished.finish_reason for event in events if event.HasField("finished")] == [
        pb.FINISH_REASON_ABORTED
    ] * 2
    assert events[-1].done.usage.completion_tokens == 10
    await client.until(lambda: nothing_left(client))


async def test_the_time_limit_between_attempts(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start, time_limit=Duration(seconds=5))
    events = await task
    assert [event.finished.finish_reason for event in events if event.HasField("finished")] == [
        pb.FINISH_REASON_TIME_LIMIT
    ]
    assert events[-1].done.usage.completion_tokens == 5
    await client.until(lambda: nothing_left(client))


async def test_a_client_that_disconnects_between_attempts(ring, start):
    client, call, task = await lone_stream_without_engine(ring, start)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await task
    await client.until(lambda: nothing_left(client))


async def test_a_drain_of_the_router_between_attempts(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start)
    await client.router.ring.drain(0.0)
    assert (await refused(task)).info.reason == "DRAINING"
    await client.until(lambda: nothing_left(client))


async def test_stop_between_attempts_leaves_no_task(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start)
    tasks_before = asyncio.all_tasks()
    await client.router.stop(0.0)
    await refused(task)
    assert not [task for task in asyncio.all_tasks() & tasks_before if "Recovery" in repr(task)]

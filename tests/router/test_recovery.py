"""Streams go on: whatever is lost under them, and whenever, the client sees one stream, each offset once."""

import asyncio
import contextlib

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from sluice.ring.errors import Fault, FinishReason
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from tests.fakes.ring_peers import Call, end, generate, text_of, token_at
from tests.router.conftest import nothing_left, refused, text_spec

LENGTH = 24
IDS = pb.OutputOptions(token_ids=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.members.TICK_SECONDS", 0.02)
    monkeypatch.setattr("router.members.HELLO_SECONDS", 0.05)
    monkeypatch.setattr("router.recovery.FIRST_BACKOFF_SECONDS", 0.002)
    monkeypatch.setattr("router.recovery.LONGEST_BACKOFF_SECONDS", 0.01)


class Script:
    """First attempts stop where a test wants them to; the others generate the whole."""

    def __init__(self, first) -> None:
        self.first = first
        self.reached = asyncio.Event()
        self.attempts: list[Call] = []

    async def __call__(self, call: Call) -> None:
        self.attempts.append(call)
        if call.submit.attempt == 0:
            await self.first(call)
            self.reached.set()
        else:
            await generate(call)


async def silent(call):
    """Nothing came back yet."""


async def begun(call):
    await call.send(start=True, cached=2)


async def midway(call):
    await call.send(start=True, cached=2)
    for offset in range(5):
        await call.send(*(tokens(call, sequence, offset) for sequence in range(call.submit.n)))


async def one_ended(call):
    await midway(call)
    last = [tokens(call, 0, offset) for offset in range(5, LENGTH)]
    last[-1] = last[-1]._replace(end=end(FinishReason.LENGTH))
    await call.send(*last, tokens(call, 1, 5))


def tokens(call, sequence, offset, count=1):
    found = [token_at(call.submit, sequence, offset + i) for i in range(count)]
    return call.row(offset, found, text_of(found), sequence)


PHASES = {"silent": silent, "begun": begun, "midway": midway, "one ended": one_ended}


def restart_engine(ring, call, client):
    call.engine.epoch += 1


def restart_detokenizer(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].epoch += 1


def silence_engine(ring, call, client):
    call.engine.beating = False


def silence_detokenizer(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].beating = False


def stall_engine(ring, call, client):
    call.engine.moving = False


def lose_text(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].lanes[client.router.address].sent += 3


def lose_tokens(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].missed = {1: 9, call.engine.epoch: 2}


def lose_messages(ring, call, client):
    """What the engine did not get may have been the submit."""
    (peer,) = [peer for peer in client.router._members.engines.all if peer.epoch == call.engine.epoch]
    call.engine.missed = {peer.lane.epoch: 1, 7: 5}


def drain_engine(ring, call, client):
    call.engine.draining = True


def drain_detokenizer(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].draining = True


def hole(ring, call, client):
    ring.soon(call.send(call.row(LENGTH - 1, [1, 2], "x", call.submit.n - 1), start=True))


def fault(code):
    def fail(ring, call, client):
        row = call.row(0, [], "", call.submit.n - 1, end(FinishReason.ERROR, fault=Fault(code, "as told")))
        ring.soon(call.send(row, start=True))

    return fail


DOUBTS = {
    function.__name__: function
    for function in (
        restart_engine,
        restart_detokenizer,
        silence_engine,
        silence_detokenizer,
        stall_engine,
        lose_text,
        lose_tokens,
        lose_messages,
        drain_engine,
        drain_detokenizer,
        hole,
    )
} | {code: fault(code) for code in ("OVERLOADED", "DRAINING", "STEP_FAILED", "ROWS_LOST", "ENGINE_LOST")}


def check_whole(events, submit, n, length=LENGTH):
    """One Started, every offset of every output once and in order, one Finished each, Done, numbered."""
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[0].HasField("started")
    assert events[-1].HasField("done")
    assert sum(event.HasField("started") or event.HasField("done") for event in events) == 2
    for index in range(n):
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
        expected = [token_at(submit, index, offset) for offset in range(length)]
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert [
            offset for delta in deltas for offset in range(delta.token_offset, delta.token_offset + delta.token_count)
        ] == list(range(length))
        assert "".join(delta.text for delta in deltas) == text_of(expected)
        (finished,) = [
            event.finished for event in events if event.HasField("finished") and event.finished.index == index
        ]
        assert (finished.finish_reason, finished.completion_tokens) == (pb.FINISH_REASON_LENGTH, length)
    usage = events[-1].done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(submit.prompt), n * length)


@pytest.fixture
async def two_of_each(ring, start):
    for name in ("a", "b"):
        ring.add_engine(name).moving = True
        ring.add_detokenizer(f"detok-{name}")
    return await start(peer_timeout=0.6, stall_timeout=0.4)


@pytest.mark.parametrize("doubt", DOUBTS)
@pytest.mark.parametrize("phase", PHASES)
async def test_every_doubt_at_every_phase(two_of_each, ring, phase, doubt):
    client = two_of_each
    ring.script = script = Script(PHASES[phase])
    task = asyncio.ensure_future(client.events(text_spec(n=2, output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 10)
    first = script.attempts[0]
    DOUBTS[doubt](ring, first, client)
    events = await asyncio.wait_for(task, 20)
    check_whole(events, first.submit, 2)
    second = script.attempts[1].submit
    assert [call.submit.attempt for call in script.attempts] == [0, 1]
    assert second.time_limit is None
    assert (second.request, second.prompt, second.stopping) == (
        first.submit.request,
        first.submit.prompt,
        first.submit.stopping,
    )
    received = {"silent": [0, 0], "begun": [0, 0], "midway": [5, 5], "one ended": [LENGTH, 6]}[phase]
    assert second.ended == [i for i in range(2) if received[i] == LENGTH]
    assert second.resume == {
        i: [token_at(second, i, offset) for offset in range(count)]
        for i, count in enumerate(received)
        if 0 < count < LENGTH
    }
    if phase == "midway":
        assert events[0].started.cached_tokens == 2
    await client.until(lambda: nothing_left(client))
    (line,) = client.lines()
    assert (line["attempts"], line["outcome"]) == (2, "LENGTH")
    assert len(client.lines("attempt given up")) == sum(client.router._tally.recoveries.values()) == 1
    # Whoever still lives was told that the first attempt is over.
    if not doubt.startswith(("restart", "silence")):
        request = first.submit.request
        await client.until(lambda: any((c.request, c.attempt) == (request, 0) for c in ring.cancels))
        drops = ring.detokenizers[first.submit.detokenizer].drops
        await client.until(lambda: [(drop.request, drop.attempt) for drop in drops] == [(request, 0)])


async def test_many_streams_move_and_the_late_rows_of_before_change_nothing(two_of_each, ring):
    client = two_of_each
    firsts = []

    async def first(call):
        await midway(call)
        firsts.append(call)

    ring.script = Script(first)
    tasks = [asyncio.ensure_future(client.events(text_spec(f"x = {i}", n=2, output=IDS))) for i in range(32)]
    await client.until(lambda: len(firsts) == 32)
    frozen = ring.script.attempts[0].engine
    frozen.beating = False
    moved = [call for call in firsts if call.engine is frozen]
    await client.until(lambda: len(ring.calls) == 32 + len(moved))
    for call in moved:
        await call.send(*(tokens(call, i, 5, LENGTH - 5)._replace(end=end(FinishReason.LENGTH)) for i in range(2)))
    # Those of the other engine go on with an attempt of their own once it drains.
    frozen.beating = True
    await client.until(lambda: len(client.router._members.engines.usable) == 2)
    next(engine for engine in ring.engines.values() if engine is not frozen).draining = True
    by_name = {call.submit.name: call.submit for call in firsts}
    for task in tasks:
        events = await asyncio.wait_for(task, 20)
        check_whole(events, by_name[events[0].started.request_id], 2)
    await client.until(lambda: client.router._dispatcher.late_rows >= 2 * len(moved) and nothing_left(client))


async def test_alone_in_its_ring_a_stream_waits_for_the_restart(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=0.3, recovery_timeout=20)
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(n=2, output=IDS)))
    await script.reached.wait()
    engine.beating = False
    await client.until(lambda: client.lines("attempt given up"))
    await asyncio.sleep(0.3)
    assert not task.done()
    assert client.router._admission.live == 1
    engine.epoch += 1
    engine.beating = True
    check_whole(await task, script.attempts[0].submit, 2)
    await client.until(lambda: nothing_left(client))


@pytest.mark.parametrize("streaming", [True, False])
async def test_nobody_comes_back_in_time(ring, start, streaming):
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


async def test_attempts_that_bring_nothing_are_bounded(client, ring):
    async def refuse(call):
        await call.send(call.row(0, [], "", 0, end(FinishReason.ERROR, fault=Fault("OVERLOADED", "full"))), start=True)

    ring.script = refuse
    call = client.stream(text_spec())
    details = await refused(call.read())
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert not await call.initial_metadata()
    assert [call.submit.attempt for call in ring.calls] == list(range(8))
    await client.until(lambda: nothing_left(client))
    assert client.lines()[0]["attempts"] == 8
    assert sum(client.router._tally.recoveries.values()) == 7


async def test_attempts_that_bring_tokens_are_not(client, ring):
    async def one_token(call):
        offset = len(call.submit.resume.get(0, ()))
        await call.send(tokens(call, 0, offset), start=True)
        if offset == LENGTH - 1:
            await call.send(call.row(LENGTH, [], "", 0, end(FinishReason.LENGTH)))
        else:
            failed = end(FinishReason.ERROR, fault=Fault("STEP_FAILED", "again"))
            await call.send(call.row(offset + 1, [], "", 0, failed))

    ring.script = one_token
    events = await client.events(text_spec(output=IDS))
    check_whole(events, ring.calls[0].submit, 1)
    assert len(ring.calls) == LENGTH
    assert client.router._tally.recoveries == {"STEP_FAILED": LENGTH - 1}


async def test_tokens_in_the_row_of_a_fault_are_kept(client, ring):
    async def last_words(call):
        if call.submit.attempt:
            return await generate(call)
        fault = end(FinishReason.ERROR, fault=Fault("ROWS_LOST", "a gap"))
        return await call.send(tokens(call, 0, 0, 3)._replace(end=fault), start=True)

    ring.script = last_words
    check_whole(await client.events(text_spec(output=IDS)), ring.calls[0].submit, 1)
    assert len(ring.calls[1].submit.resume[0]) == 3


async def test_who_refused_is_not_asked_again_at_once(two_of_each, ring):
    async def full(call):
        if call.engine.name == "a":
            fault = end(FinishReason.ERROR, fault=Fault("OVERLOADED", "full"))
            await call.send(call.row(0, [], "", 0, fault), start=True)
        else:
            await generate(call)

    ring.script = full
    for i in range(8):
        events = await two_of_each.events(text_spec(f"x{i}"))
        assert events[-1].HasField("done")
        # What the refused attempt said of the start was not told.
        assert events[0].started.cached_tokens > 0
    assert all(call.submit.attempt <= 1 for call in ring.calls)
    assert {call.engine.name for call in ring.calls if call.submit.attempt} <= {"b"}


async def test_faults_of_the_request_itself_are_not_tried_again(client, ring):
    async def refuse(call):
        fault = end(FinishReason.ERROR, fault=Fault("TEXT_FAILED", "no"))
        await call.send(call.row(0, [], "", 0, fault), start=True)

    ring.script = refuse
    assert (await refused(client.events(text_spec()))).info.reason == "TEXT_FAILED"
    assert len(ring.calls) == 1


async def lone_stream_without_engine(ring, start, **fields):
    """A stream between two attempts that nobody comes to take."""
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
    await client.until(lambda: client.router._dispatcher._recovery.waiting and len(events) >= 2)
    return client, call, task


async def test_abort_between_attempts_ends_at_once(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start, request_id="r", n=2)
    assert (await client.generation.Abort(pb.AbortRequest(request_id="r"))).aborted
    events = await task
    assert [event.finished.finish_reason for event in events if event.HasField("finished")] == [
        pb.FINISH_REASON_ABORTED
    ] * 2
    assert events[-1].done.usage.completion_tokens == 10
    await client.until(lambda: nothing_left(client))


async def test_the_time_limit_between_attempts(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start, time_limit=Duration(seconds=2))
    events = await task
    assert [event.finished.finish_reason for event in events if event.HasField("finished")] == [
        pb.FINISH_REASON_TIME_LIMIT
    ]
    assert events[-1].done.usage.completion_tokens == 5
    await client.until(lambda: nothing_left(client))


async def test_a_client_that_leaves_between_attempts(ring, start):
    client, call, task = await lone_stream_without_engine(ring, start)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await task
    await client.until(lambda: nothing_left(client))


async def test_a_drain_of_the_router_between_attempts(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start)
    await client.router._drain.run(0.0)
    assert (await refused(task)).info.reason == "DRAINING"
    await client.until(lambda: nothing_left(client))


async def test_stop_between_attempts_leaves_no_task(ring, start):
    client, _, task = await lone_stream_without_engine(ring, start)
    before = asyncio.all_tasks()
    await client.router.stop(0.0)
    await refused(task)
    assert not [task for task in asyncio.all_tasks() & before if "Recovery" in repr(task)]


async def test_a_stalled_engine_that_moves_again_is_usable(ring, start):
    engine = ring.add_engine()
    engine.moving = True
    ring.add_detokenizer()
    client = await start(stall_timeout=0.3)
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS)))
    await script.reached.wait()
    engine.moving = False
    await client.until(lambda: not client.router._members.engines.usable)
    assert len(client.router._members.engines.heard) == 1
    engine.moving = True
    check_whole(await task, script.attempts[0].submit, 1)
    (line,) = client.lines("attempt given up")
    assert line["reason"] == "ENGINE_LOST"


async def test_an_engine_that_tells_no_progress_is_no_stalled_one(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(stall_timeout=0.1)
    await asyncio.sleep(0.5)
    assert client.router._members.engines.usable


async def test_what_drains_alone_keeps_its_streams(ring, start):
    engine = ring.add_engine("a")
    ring.add_detokenizer()
    client = await start(engines=(engine.address, f"ipc://{ring.folder}/b"), wait=False)
    await client.until_serving()
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS)))
    await script.reached.wait()
    engine.draining = True
    await client.until(lambda: not client.router._members.engines.usable)
    await asyncio.sleep(0.2)
    assert not client.lines("attempt given up")
    # As soon as another one is there they move.
    ring.add_engine("b")
    check_whole(await task, script.attempts[0].submit, 1)
    assert [call.engine.name for call in ring.calls] == ["a", "b"]


async def test_an_aborted_stream_whose_engine_is_lost_ends_with_aborted(two_of_each, ring):
    client = two_of_each
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(request_id="r", n=2, output=IDS)))
    await script.reached.wait()
    await client.generation.Abort(pb.AbortRequest(request_id="r"))
    script.attempts[0].engine.epoch += 1
    events = await task
    assert [event.finished.finish_reason for event in events if event.HasField("finished")] == [
        pb.FINISH_REASON_ABORTED
    ] * 2
    assert len(script.attempts) == 1
    await client.until(lambda: nothing_left(client))


async def test_times_are_those_of_the_whole(two_of_each, ring):
    client = two_of_each
    ring.script = script = Script(midway)
    spec = text_spec(output=pb.OutputOptions(timings=True))
    task = asyncio.ensure_future(client.events(spec))
    await script.reached.wait()
    await asyncio.sleep(0.5)
    script.attempts[0].engine.epoch += 1
    timings = (await task)[-1].done.timings
    first, decode = timings.time_to_first_token.ToTimedelta(), timings.decode.ToTimedelta()
    # 1.5 s is what the second attempt's engine tells of itself; half a second passed before it.
    assert first.total_seconds() < 0.4
    assert decode.total_seconds() >= 1.9


async def test_a_unary_answer_goes_on_too(two_of_each, ring):
    client = two_of_each
    ring.script = script = Script(midway)
    spec = text_spec(n=2, output=IDS, sampling=sampling_pb2.SamplingParams(seed=3))
    task = asyncio.ensure_future(client.generate(spec))
    await script.reached.wait()
    script.attempts[0].engine.epoch += 1
    outputs = (await task).outputs
    for i, output in enumerate(outputs):
        assert list(output.token_ids) == [token_at(script.attempts[0].submit, i, offset) for offset in range(LENGTH)]
        assert output.text == text_of(output.token_ids)

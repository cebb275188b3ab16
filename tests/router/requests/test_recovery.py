"""After any loss in any phase, the client sees one uninterrupted stream with each offset once."""

import asyncio
import time

import pytest

from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.wire.errors import Fault, FinishReason
from tests.fakes.ring_scripts import end, text_of, token_at
from tests.router.conftest import nothing_left, text_spec
from tests.router.requests.broken_attempts import IDS, LENGTH, PHASES, Script, check_whole, midway, tokens

pytestmark = pytest.mark.usefixtures("quick_recovery")


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
    ring.detokenizers[call.submit.detokenizer].lanes[client.router.ring.address].sent += 3


def lose_tokens(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].missed = {1: 9, call.engine.epoch: 2}


def lose_messages(ring, call, client):
    """The Submit may have been among the messages that the engine did not receive."""
    (peer,) = [peer for peer in client.router.ring.membership.engines.all if peer.epoch == call.engine.epoch]
    call.engine.missed = {peer.lane.epoch: 1, 7: 5}


def drain_engine(ring, call, client):
    call.engine.draining = True


def drain_detokenizer(ring, call, client):
    ring.detokenizers[call.submit.detokenizer].draining = True


def skip_offsets(ring, call, client):
    ring.soon(call.send(call.row(LENGTH - 1, [1, 2], "x", call.submit.n - 1), start=True))


def fault(code):
    def fail(ring, call, client):
        row = call.row(0, [], "", call.submit.n - 1, end(FinishReason.ERROR, fault=Fault(code, "injected")))
        ring.soon(call.send(row, start=True))

    return fail


LOSSES = {
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
        skip_offsets,
    )
} | {code: fault(code) for code in ("OVERLOADED", "DRAINING", "STEP_FAILED", "ROWS_LOST", "ENGINE_LOST")}


@pytest.mark.quick(24)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("phase", PHASES)
async def test_every_loss_in_every_phase(two_of_each, ring, phase, loss):
    client = two_of_each
    ring.script = script = Script(PHASES[phase])
    task = asyncio.ensure_future(client.events(text_spec(n=2, output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    first = script.attempts[0]
    LOSSES[loss](ring, first, client)
    events = await asyncio.wait_for(task, 60)
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
    prompt = len(second.prompt)
    # Half of the prompt was cached there. Of an attempt that has not started, nothing is computed again.
    assert line["recomputed_tokens"] == (0 if phase == "silent" else prompt - prompt // 2)
    assert len(client.lines("attempt_given_up")) == sum(client.router.ring.counters.recoveries.values()) == 1
    # The peers that are still alive were notified that the first attempt was given up.
    if not loss.startswith(("restart", "silence")):
        request = first.submit.request
        await client.until(lambda: any((c.request, c.attempt) == (request, 0) for c in ring.cancels))
        drops = ring.detokenizers[first.submit.detokenizer].drops
        await client.until(lambda: [(drop.request, drop.attempt) for drop in drops] == [(request, 0)])


async def test_many_streams_move_and_late_rows_of_lost_attempts_are_ignored(two_of_each, ring):
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
    # The streams of the other engine continue with a second attempt once it drains.
    frozen.beating = True
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    next(engine for engine in ring.engines.values() if engine is not frozen).draining = True
    by_name = {call.submit.name: call.submit for call in firsts}
    for task in tasks:
        events = await asyncio.wait_for(task, 60)
        check_whole(events, by_name[events[0].started.request_id], 2)
    await client.until(lambda: client.router.ring.dispatcher.late_rows >= 2 * len(moved) and nothing_left(client))


async def test_a_stalled_engine_that_makes_progress_again_is_usable(ring, start):
    engine = ring.add_engine()
    engine.moving = True
    ring.add_detokenizer()
    client = await start(stall_timeout=0.3)
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS)))
    await script.reached.wait()
    engine.moving = False
    await client.until(lambda: not client.router.ring.membership.engines.usable)
    assert len(client.router.ring.membership.engines.alive) == 1
    engine.moving = True
    check_whole(await task, script.attempts[0].submit, 1)
    (line,) = client.lines("attempt_given_up")
    assert line["reason"] == "ENGINE_LOST"


async def test_an_engine_that_reports_no_progress_does_not_count_as_stalled(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(stall_timeout=0.1)
    await asyncio.sleep(0.5)
    assert client.router.ring.membership.engines.usable


async def test_a_lone_draining_engine_keeps_its_streams(ring, start):
    engine = ring.add_engine("a")
    ring.add_detokenizer()
    client = await start(engines=(engine.address, f"ipc://{ring.folder}/b"), wait=False)
    await client.until_serving()
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS)))
    await script.reached.wait()
    engine.draining = True
    await client.until(lambda: client.router.ring.membership.engines.all[0].should_empty)
    await asyncio.sleep(0.2)
    assert not client.lines("attempt_given_up")
    # They move as soon as there is another engine.
    ring.add_engine("b")
    check_whole(await task, script.attempts[0].submit, 1)
    assert [call.engine.name for call in ring.calls] == ["a", "b"]


async def test_a_ring_that_is_stopped_as_a_whole_keeps_its_streams(two_of_each, ring):
    client = two_of_each
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS)))
    await script.reached.wait()
    call = script.attempts[0]
    stream_peers = {call.engine.address, ring.detokenizers[call.submit.detokenizer].address}
    membership = client.router.ring.membership
    # The signal reaches the processes one after the other, those of this stream first.
    peers = [*ring.engines.values(), *ring.detokenizers.values()]
    for peer in sorted(peers, key=lambda peer: peer.address not in stream_peers):
        peer.draining = True
        await client.until(
            lambda peer=peer: any(report.draining and report.name == peer.name for report in alive(membership))
        )
    await client.until(lambda: all(peer.should_empty for peer in alive(membership)))
    await asyncio.sleep(0.2)
    assert not client.lines("attempt_given_up")
    rest = [tokens(call, 0, offset) for offset in range(5, LENGTH)]
    await call.send(*rest[:-1], rest[-1]._replace(end=end(FinishReason.LENGTH)))
    check_whole(await task, call.submit, 1)


def alive(membership):
    return [*membership.engines.alive, *membership.detokenizers.alive]


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


async def test_times_cover_all_attempts(two_of_each, ring):
    client = two_of_each
    ring.script = script = Script(midway)
    spec = text_spec(output=pb.OutputOptions(timings=True))
    start = time.monotonic()
    task = asyncio.ensure_future(client.events(spec))
    await script.reached.wait()
    (request,) = client.router.ring.requests.open
    await client.until(lambda: request.first_token_seconds is not None)
    received = time.monotonic() - start
    await asyncio.sleep(0.5)
    script.attempts[0].engine.epoch += 1
    timings = (await task)[-1].done.timings
    first, decode = timings.time_to_first_token.ToTimedelta(), timings.decode.ToTimedelta()
    # The second attempt's engine reports 1.5 s; half a second had passed before it.
    assert first.total_seconds() < received
    assert decode.total_seconds() >= 1.9


async def test_a_unary_request_is_recovered_too(two_of_each, ring):
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

"""Prefill and decode apart: the client sees one stream, whatever ends an attempt at whatever moment."""

import asyncio
from functools import partial

import pytest
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.wire.errors import FinishReason
from sluice.wire.stats import StepStats
from tests.fakes.ring_scripts import TIMES, end, generate, token_at
from tests.fakes.submits import extras_of
from tests.router.conftest import nothing_left, refused
from tests.router.requests.broken_attempts import IDS, LENGTH, Script, check_whole, midway, tokens

pytestmark = pytest.mark.usefixtures("quick_recovery")

FULL = StepStats(max_requests=3, active_requests=3, tokens_per_kv_block=16)
PROMPT = [i % 300 for i in range(600)]


def long_spec(**fields):
    return pb.GenerationSpec(**{"token_ids": pb.TokenIds(ids=PROMPT), "output": IDS} | fields)


async def divide(ring, start, **settings):
    """A ring with one engine of the prefill phase and two of the decode phase, which read each other's blocks."""
    for name, phase in (("p", "prefill"), ("d1", "decode"), ("d2", "decode")):
        engine = ring.add_engine(name)
        engine.phase, engine.kv_group, engine.moving = phase, "g", True
    ring.add_detokenizer("detok-a")
    ring.add_detokenizer("detok-b")
    return await start(peer_timeout=0.6, stall_timeout=0.4, **settings)


@pytest.fixture
async def divided(ring, start):
    return await divide(ring, start)


def engine_of(ring, name):
    return next(engine for engine in ring.engines.values() if engine.name == name)


def calls_in_order(ring):
    return sorted(ring.calls, key=lambda call: call.submit.attempt)


async def ended(client):
    await client.until(lambda: nothing_left(client))
    (line,) = client.lines()
    return line


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_long_prompt_is_computed_by_one_engine_and_continued_by_another(divided, ring, streaming):
    client = divided
    if streaming:
        check_whole(await client.events(long_spec()), await first_submit(client, ring), 1)
    else:
        (output,) = (await client.generate(long_spec())).outputs
        submit = await first_submit(client, ring)
        assert list(output.token_ids) == [token_at(submit, 0, offset) for offset in range(LENGTH)]
        assert output.finish_reason == pb.FINISH_REASON_LENGTH
    prefill, decode = calls_in_order(ring)
    assert (prefill.engine.name, prefill.submit.stopping.max_tokens, prefill.submit.stopping.hands_over) == (
        "p",
        1,
        True,
    )
    assert decode.engine.name in ("d1", "d2")
    assert (decode.submit.attempt, decode.submit.resume) == (1, {0: [token_at(decode.submit, 0, 0)]})
    assert not decode.submit.stopping.hands_over
    assert decode.submit.stopping.max_tokens > LENGTH
    line = await ended(client)
    assert (line["prefill_engine"], line["engine"], line["attempts"]) == ("p", decode.engine.name, 2)
    assert (line["outcome"], line["cached_tokens"]) == ("LENGTH", len(PROMPT) // 2)
    assert line["recomputed_tokens"] == len(PROMPT) // 2
    counters = client.router.ring.counters
    assert (counters.handovers, counters.recoveries) == ({"continued": 1}, {})
    assert client.lines("attempt_given_up") == []
    # The attempt has ended everywhere: there is nothing to cancel.
    assert ring.cancels == []
    assert not any(detokenizer.drops for detokenizer in ring.detokenizers.values())


async def first_submit(client, ring):
    await client.until(lambda: ring.calls)
    return calls_in_order(ring)[0].submit


async def test_times_up_to_the_first_token_are_those_of_the_first_engine(divided, ring):
    async def script(call):
        if not call.submit.attempt:
            # As long as the engine's times say: a quarter of a second in the queue, half a second for the prompt.
            await asyncio.sleep(TIMES.queue + TIMES.context)
        await generate(call)

    ring.script = script
    events = await divided.events(long_spec(output=pb.OutputOptions(timings=True)))
    timings = events[-1].done.timings
    queue, prefill, first = (
        duration.ToTimedelta().total_seconds()
        for duration in (timings.queue, timings.prefill, timings.time_to_first_token)
    )
    before = (await ended(divided))["queue_seconds"]
    assert queue == pytest.approx(TIMES.queue + before, abs=0.05)
    assert prefill >= TIMES.context - 0.05
    assert first >= TIMES.queue + TIMES.context - 0.05
    assert len(ring.calls) == 2


async def test_a_short_prompt_goes_to_an_engine_that_generates(divided, ring):
    check_whole(await divided.events(long_spec(token_ids=pb.TokenIds(ids=PROMPT[:200]))), ring.calls[0].submit, 1)
    (call,) = ring.calls
    assert call.engine.phase == "decode"
    assert "prefill_engine" not in await ended(divided)
    assert divided.router.ring.counters.handovers == {}


async def test_a_prompt_that_was_handed_over_goes_to_the_same_engine_the_next_time(divided, ring):
    await divided.events(long_spec())
    decode = calls_in_order(ring)[1].engine
    await divided.events(long_spec())
    assert [call.engine for call in ring.calls if call.submit.attempt == 0][-1] in (decode,)
    assert len(ring.calls) == 3


async def test_a_single_token_needs_no_other_engine(divided, ring):
    events = await divided.events(long_spec(stopping=sampling_pb2.StoppingCriteria(max_tokens=1)))
    check_whole(events, ring.calls[0].submit, 1, length=1)
    (call,) = ring.calls
    assert (call.engine.name, call.submit.stopping.hands_over) == ("p", False)


async def test_a_first_token_that_ends_the_output_ends_the_request(divided, ring):
    async def stop(call):
        row = call.row(0, [5], "<5>", end=end(FinishReason.EOS))
        await call.send(row, start=True)

    ring.script = stop
    events = await divided.events(long_spec())
    assert events[-2].finished.finish_reason == pb.FINISH_REASON_EOS
    assert len(ring.calls) == 1
    assert (await ended(divided))["outcome"] == "EOS"
    assert divided.router.ring.counters.handovers == {"ended": 1}


async def test_of_several_outputs_only_those_that_have_not_ended_continue(divided, ring):
    async def script(call):
        if call.submit.attempt:
            await generate(call)
            return
        first, last = tokens(call, 0, 0), tokens(call, 1, 0)
        await call.send(first._replace(end=end(FinishReason.HANDED_OVER)), start=True)
        await call.send(last._replace(end=end(FinishReason.EOS)))

    ring.script = script
    events = await divided.events(long_spec(n=2))
    _, decode = calls_in_order(ring)
    assert (decode.submit.ended, list(decode.submit.resume)) == ([1], [0])
    ends = {e.finished.index: e.finished.completion_tokens for e in events if e.HasField("finished")}
    assert ends == {0: LENGTH, 1: 1}
    assert (await ended(divided))["outcome"] == "EOS,LENGTH"


WHOLE = {
    "beams": {"sampling": sampling_pb2.SamplingParams(beam_search=sampling_pb2.BeamSearch(width=2))},
    "tensors": {"output": pb.OutputOptions(generation_logits=True)},
    "rows of embeddings": {
        "token_ids": pb.TokenIds(ids=[*PROMPT, 4096]),
        "prompt_table": pb.PromptTable(embeddings=pb.Embeddings(shape=[1, 2], dtype="float32", data=bytes(8))),
    },
}


@pytest.mark.parametrize("kind", WHOLE)
async def test_what_cannot_be_handed_over_is_computed_by_an_engine_that_generates(divided, ring, kind):
    stream = divided.stream(long_spec(**WHOLE[kind]))
    await divided.until(lambda: ring.calls)
    stream.cancel()
    (call,) = ring.calls
    assert (call.engine.phase, call.submit.stopping.hands_over) == ("decode", False)
    await divided.until(lambda: nothing_left(divided))


async def test_a_resumed_stream_goes_to_an_engine_that_generates(divided, ring):
    resume = [pb.ResumeFrom(index=0, token_ids=[1, 2])]
    sampling = sampling_pb2.SamplingParams(temperature=0)
    stream = divided.stream(long_spec(resume=resume, sampling=sampling))
    await divided.until(lambda: ring.calls)
    stream.cancel()
    assert ring.calls[0].engine.phase == "decode"


def alone(ring):
    """Without engines that generate, the one of the prefill phase does."""
    for name in ("d1", "d2"):
        engine_of(ring, name).draining = True
    return "p"


def no_prefill(ring):
    engine_of(ring, "p").draining = True
    return "d1", "d2"


def full_prefill(ring):
    engine_of(ring, "p").stats = FULL
    return "d1", "d2"


def full_decode(ring):
    for name in ("d1", "d2"):
        engine_of(ring, name).stats = FULL
    return "p"


def strangers(ring):
    """Where nothing can be copied, phases are ignored."""
    engine_of(ring, "p").kv_group = "other"
    return "p", "d1", "d2"


@pytest.mark.parametrize("change", [alone, no_prefill, full_prefill, full_decode, strangers])
async def test_where_phases_cannot_be_followed_one_engine_computes_everything(divided, ring, change):
    engines = change(ring)
    for engine in ring.engines.values():
        await engine.report_state()
    await asyncio.sleep(0.1)
    check_whole(await divided.events(long_spec(n=2)), ring.calls[0].submit, 2)
    (call,) = ring.calls
    assert call.engine.name in engines
    assert not call.submit.stopping.hands_over
    assert (await ended(divided))["attempts"] == 1


async def test_an_engine_of_both_phases_keeps_what_it_begins(divided, ring, start):
    engine_of(ring, "d1").phase = "both"
    engine_of(ring, "p").stats = StepStats(max_requests=1000, active_requests=20, tokens_per_kv_block=16)
    for engine in ring.engines.values():
        await engine.report_state()
    await divided.events(long_spec())
    (call,) = ring.calls
    assert (call.engine.name, call.submit.stopping.hands_over) == ("d1", False)


# The moments of a hand-over at which a peer is lost: before, with and after the first token, and at the second engine.


async def submitted(call, reached):
    reached.set()


async def started(call, reached):
    await call.send(start=True, cached=2)
    reached.set()


async def first_token(call, reached):
    await call.send(tokens(call, 0, 0), tokens(call, 1, 0), start=True)
    await call.engine.ring.until_read()
    reached.set()


async def half_handed_over(call, reached):
    await call.send(tokens(call, 0, 0)._replace(end=end(FinishReason.HANDED_OVER)), start=True)
    await call.engine.ring.until_read()
    reached.set()


def die(engine):
    engine.epoch += 1


def fall_silent(engine):
    engine.beating = False


@pytest.mark.parametrize("loss", [die, fall_silent])
@pytest.mark.parametrize("moment", [submitted, started, first_token, half_handed_over])
async def test_a_loss_of_the_first_engine(divided, ring, moment, loss):
    client, reached = divided, asyncio.Event()

    async def script(call):
        await (generate(call) if call.submit.attempt else moment(call, reached))

    ring.script = script
    task = asyncio.ensure_future(client.events(long_spec(n=2)))
    await asyncio.wait_for(reached.wait(), 30)
    loss(engine_of(ring, "p"))
    check_whole(await asyncio.wait_for(task, 30), ring.calls[0].submit, 2)
    await ended(client)
    handovers = client.router.ring.counters.handovers
    assert (sum(client.router.ring.counters.recoveries.values()), handovers["lost"]) == (1, 1)


@pytest.mark.parametrize("loss", [die, fall_silent])
@pytest.mark.parametrize("moment", [submitted, started])
async def test_a_loss_of_the_second_engine(divided, ring, moment, loss):
    client, reached = divided, asyncio.Event()

    async def script(call):
        await (moment(call, reached) if call.submit.attempt == 1 else generate(call))

    ring.script = script
    task = asyncio.ensure_future(client.events(long_spec(n=2)))
    await asyncio.wait_for(reached.wait(), 30)
    prefill, decode = calls_in_order(ring)
    loss(decode.engine)
    check_whole(await asyncio.wait_for(task, 30), prefill.submit, 2)
    _, _, last = calls_in_order(ring)
    # A request whose engine dies so early runs alone next, wherever there is room.
    assert last.engine.phase == "decode" or last.submit.alone
    line = await ended(client)
    assert (line["attempts"], line["prefill_engine"]) == (3, "p")
    assert client.router.ring.counters.handovers == {"continued": 1}


async def test_no_engine_takes_over_in_time(ring, start):
    client = await divide(ring, start, recovery_timeout=0.2)

    async def script(call):
        for engine in ring.engines.values():
            engine.draining = True
            await engine.report_state()
        await generate(call)

    ring.script = script
    details = await refused(client.events(long_spec()))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")


async def test_an_abort_between_the_ends_of_two_outputs(divided, ring):
    client, reached = divided, asyncio.Event()

    async def script(call):
        await half_handed_over(call, reached)
        await call.stopped.wait()
        await call.send(call.row(0, [], "", 1, end(FinishReason.ABORTED)))

    ring.script = script
    task = asyncio.ensure_future(client.events(long_spec(n=2, request_id="r")))
    await reached.wait()
    await client.generation.Abort(pb.AbortRequest(request_id="r"))
    events = await asyncio.wait_for(task, 30)
    reasons = [event.finished.finish_reason for event in events if event.HasField("finished")]
    assert reasons == [pb.FINISH_REASON_ABORTED] * 2
    await ended(client)
    assert len(ring.calls) == 1


async def test_an_engine_that_hands_over_without_a_token_is_not_trusted_forever(divided, ring):
    async def script(call):
        await call.send(call.row(0, [], end=end(FinishReason.HANDED_OVER)), start=True)

    ring.script = script
    details = await refused(divided.events(long_spec()))
    assert details.info.reason == "ROWS_LOST"
    assert len(ring.calls) == divided.router.settings.recovery_attempts


async def test_a_request_continues_where_its_blocks_can_be_copied(ring, start):
    """Even if the lost engine has not reported them: of four pairs of engines, the lost one's twin continues."""
    for number in range(8):
        engine = ring.add_engine(f"e{number}")
        engine.kv_group, engine.moving = f"g{number // 2}", True
    ring.add_detokenizer()
    client = await start(peer_timeout=0.6, stall_timeout=0.4)
    for _ in range(3):
        ring.script = script = Script(midway)
        task = asyncio.ensure_future(client.events(long_spec()))
        await asyncio.wait_for(script.reached.wait(), 30)
        die(script.attempts[0].engine)
        check_whole(await asyncio.wait_for(task, 30), script.attempts[0].submit, 1)
        assert script.attempts[1].engine.kv_group == script.attempts[0].engine.kv_group


async def test_engines_of_other_machines_continue_with_the_blocks_of_a_keeper(divided, ring):
    for engine in ring.engines.values():
        engine.kv_group, engine.kv_keeper, engine.kv_layout = engine.name, f"tcp://{engine.name}:1", "l"
        await engine.report_state()
    await asyncio.sleep(0.1)
    check_whole(await divided.events(long_spec()), ring.calls[0].submit, 1)
    first, second = calls_in_order(ring)
    assert first.submit.stopping.hands_over
    assert second.engine.phase == "decode"
    assert extras_of(second.submit).kv_keepers == ["tcp://p:1"]


async def test_many_requests_are_handed_over_at_once(divided, ring):
    ring.script = partial(generate, pause=0.002)
    specs = [long_spec(token_ids=pb.TokenIds(ids=[i, *PROMPT])) for i in range(24)]
    streams = await asyncio.gather(*(divided.events(spec) for spec in specs))
    assert all(events[-1].done.usage.completion_tokens == LENGTH for events in streams)
    await divided.until(lambda: nothing_left(divided))
    assert {call.engine.phase for call in ring.calls if call.submit.attempt} == {"decode"}
    assert divided.router.ring.counters.handovers == {"continued": 24}

"""At every kind of end of a request, the engine is notified, the client gets one end, and no state is left behind."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import Fault, FinishReason
from tests.fakes.ring_scripts import end, generate, hang, token_at
from tests.router.conftest import Details, nothing_left, refused, rest, text_spec


def finish_reasons(events):
    return [event.finished.finish_reason for event in events if event.HasField("finished")]


async def slowly(call):
    await generate(call, pause=0.02, most=2000)


async def read_all(call):
    """Token ids of a stream, and the details of the error that ends it."""
    tokens = []
    try:
        async for event in call:
            tokens += event.delta.token_ids
    except grpc.aio.AioRpcError as error:
        return tokens, Details(error)
    raise AssertionError("the stream ended without an error")


@pytest.fixture
async def full(ring, start):
    """A client whose router already runs its only permitted request. Requests of a test stay in the queue."""
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_live=1)
    first = client.stream(text_spec())
    await first.read()
    yield client
    first.cancel()
    await client.until(lambda: nothing_left(client))
    # With the permit free, a request left in the queue would be submitted now.
    assert len(ring.calls) == 1


async def test_a_cancel_in_the_middle_reaches_the_engine_and_frees_everything(client, ring):
    ring.script = slowly
    call = client.stream(text_spec(n=2))
    async for event in call:
        if event.HasField("delta"):
            break
    call.cancel()
    await client.until(lambda: ring.cancels)
    (cancel,) = ring.cancels
    assert (cancel.request, cancel.sequence) == (ring.calls[0].submit.request, None)
    await client.until(lambda: nothing_left(client))
    assert client.lines()[0]["outcome"] == "CANCELLED"


async def test_a_cancelled_unary_call_stops_too(client, ring):
    ring.script = slowly
    task = asyncio.ensure_future(client.generate(text_spec()))
    await client.until(lambda: ring.calls)
    task.cancel()
    await client.until(lambda: ring.cancels)
    await client.until(lambda: nothing_left(client))


async def test_a_cancel_before_the_start(client, ring):
    async def silent(call):
        await call.stopped.wait()
        await call.send(call.row(0, [], "", 0, end(FinishReason.ABORTED)), start=True)

    ring.script = silent
    call = client.stream(text_spec())
    reading = asyncio.ensure_future(call.read())
    await client.until(lambda: ring.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await client.until(lambda: ring.cancels and nothing_left(client))


async def test_a_cancel_while_queued_leaves_the_queue_and_never_reaches_the_engine(full):
    second = full.stream(text_spec())
    reading = asyncio.ensure_future(second.read())
    await full.until(lambda: full.router.ring.admission.waiting == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await full.until(lambda: full.router.ring.admission.waiting == 0)
    assert full.router.ring.admission.waiting_tokens == 0


async def test_the_deadline_cancels(client, ring):
    ring.script = slowly
    seconds = 0.3
    while not ring.calls:
        # If the deadline passes before the request is on the ring, the engine is not involved.
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.events(text_spec(), timeout=seconds)
        assert error.value.code() is StatusCode.DEADLINE_EXCEEDED
        seconds *= 2
    await client.until(lambda: ring.cancels and nothing_left(client))


async def test_the_deadline_holds_in_the_queue(full):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await full.events(text_spec(), timeout=0.2)
    assert error.value.code() is StatusCode.DEADLINE_EXCEEDED
    await full.until(lambda: full.router.ring.admission.waiting == 0)


async def test_a_closed_connection_cancels(client, ring):
    ring.script = slowly
    await client.stream(text_spec()).read()
    await client.channel.close(None)
    await client.until(lambda: ring.cancels and nothing_left(client))


async def test_abort_ends_the_stream_normally_and_frees_the_id_immediately(client, ring):
    ring.script = slowly
    call = client.stream(text_spec(request_id="same", n=2))
    assert (await call.read()).HasField("started")
    assert (await client.generation.Abort(pb.AbortRequest(request_id="same", reason="test"))).aborted
    second_call = client.stream(text_spec(request_id="same"))
    assert (await second_call.read()).started.request_id == "same"
    events = await rest(call)
    assert finish_reasons(events) == [pb.FINISH_REASON_ABORTED] * 2
    assert events[-1].HasField("done")
    first, second = (call.submit.request for call in ring.calls)
    assert {cancel.request for cancel in ring.cancels} == {first}
    assert (await second_call.read()).HasField("delta")
    second_call.cancel()
    await client.until(lambda: {cancel.request for cancel in ring.cancels} == {first, second})
    await client.until(lambda: nothing_left(client))


async def test_abort_of_an_unknown_or_ended_request_is_false(client, ring):
    abort = client.generation.Abort
    assert not (await abort(pb.AbortRequest(request_id="unknown"))).aborted
    await client.events(text_spec(request_id="ended"))
    assert not (await abort(pb.AbortRequest(request_id="ended"))).aborted
    assert (await refused(abort(pb.AbortRequest()))).fields == ["request_id"]


async def test_abort_while_queued_ends_normally_without_tokens(full):
    second = asyncio.ensure_future(full.events(text_spec(request_id="queued", n=2)))
    await full.until(lambda: full.router.ring.admission.waiting == 1)
    assert (await full.generation.Abort(pb.AbortRequest(request_id="queued"))).aborted
    events = await second
    assert [event.WhichOneof("event") for event in events] == ["started", "finished", "finished", "done"]
    assert finish_reasons(events) == [pb.FINISH_REASON_ABORTED] * 2


async def test_the_time_limit_in_the_queue_ends_normally_without_tokens(full):
    # A prompt that need not be tokenized, so it waits in the queue even if the threads are slow.
    prompt = pb.TokenIds(ids=[5, 6, 7])
    answer = await full.generate(pb.GenerationSpec(token_ids=prompt, time_limit=Duration(nanos=100_000_000)))
    (output,) = answer.outputs
    assert (output.finish_reason, output.text) == (pb.FINISH_REASON_TIME_LIMIT, "")
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == 3


async def test_the_engine_gets_the_remaining_time_limit(client, ring):
    await client.events(text_spec(time_limit=Duration(seconds=90)))
    assert 0 < ring.calls[0].submit.time_limit < 90


async def test_a_stop_string_ends_that_sequence_at_the_engine(client, ring):
    async def stop_the_first(call):
        await call.send(call.row(0, [1], "a", 0), call.row(0, [2], "b", 1), start=True)
        await call.send(call.row(1, [3], "", 0, end(FinishReason.STOP_STRING, stop_string="x")))
        await client.until(lambda: ring.cancels)
        await call.send(call.row(1, [4], "c", 1, end(FinishReason.STOP_TOKEN, stop_token=4)))

    ring.script = stop_the_first
    answer = await client.generate(text_spec(n=2))
    first, second = answer.outputs
    assert (first.finish_reason, first.stop_string, first.text) == (pb.FINISH_REASON_STOP_STRING, "x", "a")
    assert (second.finish_reason, second.stop_token_id, second.text) == (pb.FINISH_REASON_STOP_TOKEN, 4, "bc")
    assert [cancel.sequence for cancel in ring.cancels] == [0]
    await client.until(lambda: nothing_left(client))


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_fault_before_the_start_is_a_status_without_metadata(client, ring, streaming):
    async def refuse(call):
        fault = Fault("NOTHING_TO_SAMPLE", "all tokens are banned")
        await call.send(call.row(0, [], "", 0, end(FinishReason.ERROR, fault=fault)), start=True)

    ring.script = refuse
    spec = text_spec()
    call = client.stream(spec) if streaming else client.generation.Generate(pb.GenerateRequest(spec=spec))
    details = await refused(call.read() if streaming else call)
    assert details.code is StatusCode.INVALID_ARGUMENT
    assert details.info.reason == "NOTHING_TO_SAMPLE"
    assert details.error.details() == "all tokens are banned"
    assert not await call.initial_metadata()
    await client.until(lambda: nothing_left(client))
    assert len(ring.calls) == 1


async def test_a_fault_of_one_sequence_ends_the_request_and_cancels_the_others(client, ring):
    async def fail_one(call):
        await call.send(call.row(0, [1], "a", 0), start=True)
        await call.send(call.row(0, [], "", 1, end(FinishReason.ERROR, fault=Fault("TEXT_FAILED", "bad text"))))
        await call.stopped.wait()
        await call.send(call.row(1, [], "", 0, end(FinishReason.ABORTED)))

    ring.script = fail_one
    details = await refused(client.events(text_spec(n=2)))
    assert (details.code, details.info.reason) == (StatusCode.INTERNAL, "TEXT_FAILED")
    await client.until(lambda: nothing_left(client) and ring.cancels)


async def test_repeated_rows_are_dropped(client, ring):
    async def send_twice(call):
        await call.send(call.row(0, [1, 2], "ab"), start=True)
        await call.send(call.row(0, [1, 2], "ab"), call.row(1, [2], "b"), start=True)
        await call.send(call.row(2, [3], "c", 0, end(FinishReason.EOS)))
        await call.send(call.row(2, [3], "c", 0, end(FinishReason.EOS)))

    ring.script = send_twice
    answer = await client.generate(text_spec(output=pb.OutputOptions(token_ids=True)))
    assert answer.outputs[0].text == "abc"
    assert list(answer.outputs[0].token_ids) == [1, 2, 3]


async def test_late_and_foreign_rows_are_counted_and_ignored(client, ring):
    async def script(call):
        await call.send(
            call.row(0, [1], "x")._replace(request=12345),
            call.row(0, [1], "x")._replace(attempt=7),
            call.row(0, [1], "x", sequence=5),
            start=True,
        )
        await call.send(call.row(0, [2], "y", 0, end(FinishReason.EOS)))

    ring.script = script
    answer = await client.generate(text_spec())
    assert answer.outputs[0].text == "y"
    assert client.router.ring.dispatcher.late_rows == 3


async def test_a_duplicate_id_is_refused_while_the_request_is_live(client, ring):
    ring.script = slowly
    call = client.stream(text_spec(request_id="one"))
    await call.read()
    details = await refused(client.events(text_spec(request_id="one")))
    assert (details.code, details.info.reason) == (StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    call.cancel()
    ring.script = generate
    await client.until(lambda: not client.router.ring.requests.open)
    assert (await client.events(text_spec(request_id="one")))[-1].HasField("done")


async def test_a_drain_waits_for_requests_refuses_new_ones_and_hands_late_ones_back(client, ring):
    ring.script = slowly
    late_call = client.stream(text_spec(request_id="late", output=pb.OutputOptions(token_ids=True)))
    events = asyncio.ensure_future(read_all(late_call))
    unary = client.generation.Generate(pb.GenerateRequest(spec=text_spec()))
    await client.until(lambda: len(ring.calls) == 2)
    await client.until(lambda: all(request.log.received > 5 for request in client.router.ring.requests.open))
    drain = asyncio.ensure_future(client.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(nanos=500_000_000))))
    await client.until(lambda: client.router.ring.requests.closed)
    with pytest.raises(grpc.aio.AioRpcError, match="Connection refused"):
        await client.events(text_spec())
    assert (await drain).aborted == 2
    details = await refused(unary)
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "DRAINING")
    # Everything received so far was delivered, so that another router can continue after it.
    tokens, details = await events
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "DRAINING")
    submit = ring.calls[0].submit
    assert len(tokens) > 5
    assert tokens == [token_at(submit, 0, i) for i in range(len(tokens))]
    await client.until(lambda: len(ring.cancels) == 2 and nothing_left(client))
    assert await client.router.drain(0.0) == 0


async def test_stop_waits_for_live_requests(client, ring):
    async def short(call):
        await generate(call, pause=0.02, most=20)

    ring.script = short
    events = asyncio.ensure_future(client.events(text_spec()))
    await client.until(lambda: ring.calls)
    await client.router.stop(60.0)
    assert finish_reasons(await events) == [pb.FINISH_REASON_LENGTH]


async def test_abort_and_time_limit_at_the_same_moment(full):
    for i in range(20):
        spec = text_spec(request_id=f"r{i}", time_limit=Duration(nanos=20_000_000))
        events = asyncio.ensure_future(full.events(spec))
        await asyncio.sleep(0.018 + 0.0005 * i)
        await asyncio.gather(*(full.generation.Abort(pb.AbortRequest(request_id=f"r{i}")) for _ in range(3)))
        assert [event.WhichOneof("event") for event in await events] == ["started", "finished", "done"]


async def test_clients_that_do_not_read_are_bounded(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = hang
    client = await start(max_open=2)
    calls = [client.stream(text_spec()) for _ in range(2)]
    for call in calls:
        await call.read()
    details = await refused(client.events(text_spec()))
    assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    for call in calls:
        call.cancel()

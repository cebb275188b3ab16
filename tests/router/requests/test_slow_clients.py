"""Clients that do not read: their requests pause at no cost and continue without loss once the client reads again."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from sluice.wire.errors import FinishReason
from tests.fakes.ring_scripts import end, generate
from tests.router.conftest import nothing_left, refused, rest, text_spec

MAX_UNDELIVERED = 256
LENGTH = 6000
IDS = pb.OutputOptions(token_ids=True)


def text_at(sequence, offset):
    return f"{sequence}:{offset} ".ljust(100, "x")


async def flood(call):
    """Send one token per row and sequence, as fast as possible, until cancelled."""
    begin = {i: len(call.submit.resume.get(i, ())) for i in range(call.submit.n) if i not in call.submit.ended}
    await call.send(start=True)
    for offset in range(min(begin.values()), LENGTH):
        if call.stopped.is_set():
            aborted = end(FinishReason.ABORTED)
            await call.send(*(call.row(max(offset, begin[i]), [], "", i, aborted) for i in begin))
            return
        last = end(FinishReason.LENGTH) if offset == LENGTH - 1 else None
        live = [i for i in begin if begin[i] <= offset]
        await call.send(*(call.row(offset, [offset % 4000], text_at(i, offset), i, last) for i in live))
        await asyncio.sleep(0)


@asynccontextmanager
async def small_window_stub(client):
    """A stub whose connection buffers at most 64 KiB, however fast it is."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", options=options) as channel:
        yield GenerationServiceStub(channel)


def paused(client):
    ring = client.router.ring
    waits = not ring.requests.on_ring and ring.dispatcher._recovery.waiting == 1
    # Not a request whose client has caught up, which is about to continue.
    return waits and all(live.log.undelivered > MAX_UNDELIVERED // 2 for live in ring.requests.open)


async def until_paused(client):
    """Wait until the request stays paused: on a busy machine the connection accepts more text after the first pause."""
    await client.until(lambda: paused(client))
    await asyncio.sleep(0.3)
    await client.until(lambda: paused(client))


@asynccontextmanager
async def paused_call(ring, client, spec, **options):
    """A stream of which only the first event is read, until its request is paused because of that."""
    ring.script = flood
    async with small_window_stub(client) as stub:
        call = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), **options)
        await call.read()
        await until_paused(client)
        yield call


def check_whole(deltas, n):
    for i in range(n):
        output_deltas = [delta for delta in deltas if delta.index == i]
        assert [token for delta in output_deltas for token in delta.token_ids] == [
            offset % 4000 for offset in range(LENGTH)
        ]
        assert "".join(delta.text for delta in output_deltas) == "".join(text_at(i, offset) for offset in range(LENGTH))
        offset_sum = 0
        for delta in output_deltas:
            assert delta.token_offset == offset_sum
            offset_sum += delta.token_count


@pytest.mark.parametrize("n", [1, 2])
async def test_unread_data_is_bounded_and_the_client_misses_nothing(ring, start, n):
    engine = ring.add_engine()
    detokenizer = ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED, max_live=1)
    ring.script = flood
    async with small_window_stub(client) as stub:
        call = stub.GenerateStream(pb.GenerateStreamRequest(spec=text_spec(n=n, output=IDS)))
        assert (await call.read()).HasField("started")
        await until_paused(client)
        (live,) = client.router.ring.requests.open
        assert MAX_UNDELIVERED // 2 < live.log.undelivered <= MAX_UNDELIVERED + n
        assert sum(len(text) for log in live.log.sequences for text in log.text) == 100 * live.log.undelivered
        # Engine and detokenizer were notified, and another request may have the permit.
        await client.until(lambda: engine.cancels and detokenizer.drops)
        assert client.router.ring.admission.live == 0
        ring.script = generate
        assert (await client.events(text_spec()))[-1].HasField("done")
        ring.script = flood
        await until_paused(client)
        assert MAX_UNDELIVERED // 2 < live.log.undelivered <= MAX_UNDELIVERED + n
        deltas = []
        while not (event := await call.read()).HasField("done"):
            if event.HasField("delta"):
                deltas.append(event.delta)
    check_whole(deltas, n)
    assert event.done.usage.completion_tokens == n * LENGTH
    assert client.router.ring.counters.recoveries.keys() == {"SLOW_CLIENT"}
    await client.until(lambda: nothing_left(client))


async def test_a_client_that_reads_nothing_for_too_long_is_disconnected(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED, slow_client_timeout=3.0)
    ring.script = flood
    async with small_window_stub(client) as stub:
        call = stub.GenerateStream(pb.GenerateStreamRequest(spec=text_spec(output=IDS)))
        await call.read()
        await client.until(lambda: client.lines() and nothing_left(client))
        (line,) = client.lines()
        assert line["outcome"] == "SLOW_CLIENT"
        received = []

        async def read():
            while event := await call.read():
                received.extend(event.delta.token_ids)

        details = await refused(read())
        assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "SLOW_CLIENT")
        assert 0 < len(received) <= line["completion_tokens"] - line["undelivered_tokens"]
        assert received == [offset % 4000 for offset in range(len(received))]


async def test_unread_streams_count_towards_their_tenants_limit(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED, max_tenant_requests=1)
    a, b = ((("x-sluice-tenant", tenant),) for tenant in "ab")
    async with paused_call(ring, client, text_spec(output=IDS), metadata=a) as call:
        details = await refused(client.events(text_spec(), metadata=a))
        assert (details.code, details.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert details.retry is not None
        ring.script = generate
        assert (await client.events(text_spec(), metadata=b))[-1].HasField("done")
        call.cancel()
    await client.until(lambda: nothing_left(client))
    assert (await client.events(text_spec(), metadata=a))[-1].HasField("done")
    assert not client.router.ring.requests._open_by_tenant


async def test_abort_while_paused(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED)
    async with paused_call(ring, client, text_spec(request_id="r", output=IDS)) as call:
        await client.generation.Abort(pb.AbortRequest(request_id="r"))
        assert client.router.ring.dispatcher._recovery.waiting == 0
        events = await rest(call)
    finished = next(event.finished for event in events if event.HasField("finished"))
    assert finished.finish_reason == pb.FINISH_REASON_ABORTED
    assert finished.completion_tokens == sum(len(event.delta.token_ids) for event in events)
    await client.until(lambda: nothing_left(client))


async def test_a_client_that_disconnects_while_paused(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED)
    async with paused_call(ring, client, text_spec(output=IDS)) as call:
        call.cancel()
        await client.until(lambda: nothing_left(client))


async def test_the_engine_dies_while_a_stream_is_paused(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED)
    async with paused_call(ring, client, text_spec(output=IDS)) as call:
        engine.epoch += 1
        await client.until(lambda: client.lines("peer_restarted"))
        deltas = [event.delta for event in await rest(call) if event.HasField("delta")]
    check_whole(deltas, 1)
    await client.until(lambda: nothing_left(client))


async def test_a_unary_request_is_never_paused(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_undelivered_tokens=MAX_UNDELIVERED)
    ring.script = flood
    answer = await client.generate(text_spec(output=IDS))
    assert len(answer.outputs[0].token_ids) == LENGTH
    assert len(ring.calls) == 1

"""Full lanes to engines, invalid frames from peers, and a client that reads slowly."""

import asyncio
import random

import grpc
import pytest
import zmq

from sluice.lanes.lane import HEADER, MAGIC
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import Hello
from sluice.wire.message import VERSION
from tests.fakes.ring_scripts import end, hang
from tests.router.conftest import text_spec


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.1)


async def until_full(lane, fill=lambda: None):
    """Wait until a lane is full and stays full: ZeroMQ makes room while it moves frames into the kernel's buffers."""
    full_polls = 0
    while full_polls < 30:
        fill()
        full_polls = 0 if lane.ready() else full_polls + 1
        await asyncio.sleep(0.05 if full_polls else 0)


@pytest.mark.long
@pytest.mark.slow
async def test_cancels_survive_a_full_lane(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_live=1000)
    ring.script = hang
    first = client.stream(text_spec())
    await first.read()
    engine.reading = False
    calls = [client.stream(text_spec("x" * 40_000, truncate_prompt_tokens=1500)) for _ in range(300)]
    readings = [asyncio.ensure_future(call.read()) for call in calls]
    await until_full(client.router.ring.membership.engines.alive[0].lane)
    for call in calls:
        call.cancel()
    await asyncio.gather(*readings, return_exceptions=True)
    await client.until(lambda: len(client.router.ring.requests.open) == 1)
    assert client.router.ring.dispatcher._attempts._cancels._unsent
    engine.reading = True
    await client.until(lambda: len(client.router.ring.requests.on_ring) == 1, 60)
    cancelled = [cancel.request for cancel in ring.cancels]
    assert sorted(cancelled) == sorted(call.submit.request for call in ring.calls[1:])
    first.cancel()


async def test_engines_with_a_full_lane_are_skipped(ring, start):
    full, free = ring.add_engine("a"), ring.add_engine("b")
    ring.add_detokenizer()
    client = await start()
    full.reading = False
    peer = next(peer for peer in client.router.ring.membership.engines.alive if peer.name == "a")
    await until_full(peer.lane, lambda: peer.lane.send(Hello("x" * 1000, client.router.ring.address)))
    await asyncio.gather(*(client.events(text_spec()) for _ in range(8)))
    assert (len(full.calls), len(free.calls)) == (0, 8)


async def test_random_bytes_in_the_inbox_are_dropped_and_counted(client, ring):
    random.seed(1)
    socket = ring.context.socket(zmq.PUSH)
    socket.connect(client.router.ring.address)
    frames = [random.randbytes(random.randrange(200)) for _ in range(200)]
    frames += [HEADER.pack(MAGIC, VERSION, 1, i) + random.randbytes(random.randrange(200)) for i in range(200)]
    frames += [HEADER.pack(MAGIC, VERSION + 1, 1, 0), b"", b"\x90" * 100_000]
    for frame in frames:
        socket.send(frame)
        await asyncio.sleep(0)
    await client.until(lambda: client.router.ring.inbox.malformed == len(frames))
    socket.close(linger=0)
    assert (await client.events(text_spec()))[-1].HasField("done")


async def test_a_slow_reader_gets_everything_joined(client, ring):
    async def flood(call):
        await call.send(start=True)
        for i in range(2000):
            await call.send(call.row(i, [i], f"{i} " + "x" * 200, 0, end(FinishReason.LENGTH) if i == 1999 else None))

    ring.script = flood
    # A client that buffers at most 64 KiB, even on a fast connection.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.router.port}", options=options) as channel:
        spec = text_spec(output=pb.OutputOptions(token_ids=True))
        call = GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=spec))
        await call.read()
        await client.until(lambda: not client.router.ring.requests.on_ring)
        deltas = []
        while (event := await call.read()).HasField("delta"):
            deltas.append(event.delta)
    assert [token for delta in deltas for token in delta.token_ids] == list(range(2000))
    assert "".join(delta.text for delta in deltas) == "".join(f"{i} " + "x" * 200 for i in range(2000))
    assert len(deltas) < 1900

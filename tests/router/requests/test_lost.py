"""Engines and detokenizers that are late, die, restart, or stop reading."""

import asyncio
import contextlib
import os
import random
import socket
import time

import grpc
import pytest
import zmq
from grpc import StatusCode

from sluice.ring.errors import FinishReason
from sluice.ring.heartbeats import Hello
from sluice.ring.inbox import Inbox
from sluice.ring.lane import HEADER, MAGIC
from sluice.ring.message import VERSION
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes.ring_scripts import end, generate, hang
from tests.router.conftest import nothing_left, refused, rest, text_spec


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.1)


async def busy(client, ring, **fields):
    """A stream that has started and hangs."""
    ring.script = hang
    call = client.stream(text_spec(**fields))
    await call.read()
    return call


async def until_full(lane, fill=lambda: None):
    """Until a lane is full and stays so: what ZeroMQ still moves into the kernel's buffers makes room again."""
    quiet = 0
    while quiet < 30:
        fill()
        quiet = 0 if lane.ready() else quiet + 1
        await asyncio.sleep(0.05 if quiet else 0)


async def test_a_silent_engine_is_lost_and_comes_back(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0, peer_wait=0.1, recovery_timeout=0.2)
    call = await busy(client, ring)
    engine.beating = False
    details = await refused(call.read())
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert details.retry is not None
    await client.until(lambda: nothing_left(client))
    details = await refused(client.events(text_spec()))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
    # It was only slow: what it was told to stop meanwhile it stops.
    await client.until(lambda: ring.cancels)
    engine.beating = True
    ring.script = generate
    await client.until_serving()
    assert (await client.events(text_spec()))[-1].HasField("done")


async def test_a_silent_detokenizer_is_lost_and_its_requests_are_cancelled(ring, start):
    ring.add_engine()
    detokenizer = ring.add_detokenizer()
    client = await start(peer_timeout=1.0, peer_wait=0.1, recovery_timeout=0.2)
    call = await busy(client, ring)
    detokenizer.beating = False
    details = await refused(call.read())
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "DETOKENIZER_LOST")
    await client.until(lambda: ring.cancels and nothing_left(client))
    details = await refused(client.events(text_spec()))
    assert details.info.reason == "NO_DETOKENIZER"


async def test_a_router_that_takes_the_place_of_another_has_lost_nothing(ring, start):
    ring.add_engine()
    detokenizer = ring.add_detokenizer()
    former = await start()
    assert await former.events(text_spec())
    await former.router.stop(0.0)
    client = await start()
    assert await client.events(text_spec())
    assert (client.router.ring.inbox.gaps, client.lines("frames_lost")) == (0, [])
    detokenizer.lanes[client.router.ring.address].sent += 2
    await client.until(lambda: client.lines("frames_lost"))
    assert client.lines("frames_lost")[0]["requests"] == 0
    assert client.router.ring.inbox.gaps == 1


async def test_a_peer_that_hung_up_and_is_silent_is_lost_long_before_the_timeout(ring, start, monkeypatch):
    # Sooner than a heartbeat could be missed: that the connection was refused is enough.
    monkeypatch.setattr("router.peers.peers.HUNG_UP_SECONDS", 600.0)
    dying, other = ring.add_engine("dying"), ring.add_engine("other")
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0)
    call = await busy(client, ring)
    (first,) = ring.calls
    ring.script = generate
    dead = dying if first.submit.engine_epoch == dying.epoch else other
    await dead.close()
    await client.until(lambda: client.lines("peer_lost"))
    assert (await rest(call))[-1].HasField("done")
    assert len(client.lines("peer_lost")) == 1


@contextlib.contextmanager
def nobody_answers(address):
    """Connections to this ipc address are accepted, and that is all."""
    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield
        os.unlink(path)


async def heartbeats_for(client, peer, seconds):
    """Wait until its heartbeats have come for so long."""
    heard = []
    hear, peer.on_heartbeat = peer.on_heartbeat, lambda heartbeat, now: (heard.append(now), hear(heartbeat, now))
    await client.until(lambda: heard and time.monotonic() - heard[0] > seconds)


async def test_a_peer_that_was_cut_off_and_still_heartbeats_is_not_lost(ring, start, monkeypatch):
    # On a busy machine the fakes' heartbeats come late.
    monkeypatch.setattr("router.peers.peers.HUNG_UP_SECONDS", 4.0)
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0)
    call = await busy(client, ring)
    (peer,) = client.router.ring.membership.engines.all
    engine.reading = False
    engine.inbox.close()
    with nobody_answers(engine.address):
        await client.until(lambda: peer.unreachable)
        await heartbeats_for(client, peer, 5.0)
        assert not client.lines("peer_lost")
    call.cancel()


async def test_a_peer_that_closed_its_inbox_and_still_heartbeats_is_lost_only_once(ring, start, monkeypatch):
    monkeypatch.setattr("router.peers.peers.HUNG_UP_SECONDS", 4.0)
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0)
    call = await busy(client, ring)
    (peer,) = client.router.ring.membership.engines.all
    engine.reading = False
    engine.inbox.close()
    await client.until(lambda: client.lines("peer_lost"))
    await heartbeats_for(client, peer, 5.0)
    assert peer.alive
    assert len(client.lines("peer_lost")) == 1
    call.cancel()


async def test_a_peer_that_heartbeats_but_cannot_be_reached_gets_nothing_new(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0, peer_wait=0.2)
    call = await busy(client, ring)
    (peer,) = client.router.ring.membership.engines.all
    engine.reading = False
    engine.inbox.close()
    with nobody_answers(engine.address):
        await client.until(lambda: not peer.usable)
        details = await refused(client.events(text_spec()))
        assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
        assert len(client.router.ring.requests.on_ring) == 1
    ring.script = generate
    engine.inbox = Inbox(ring.context, engine.address, engine.kinds)
    engine.reading = True
    await client.until(lambda: peer.usable)
    assert (await client.events(text_spec()))[-1].HasField("done")
    call.cancel()


async def test_a_restarted_engine_is_a_new_one(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    call = await busy(client, ring)
    ring.script = generate
    engine.epoch += 1
    assert (await rest(call))[-1].HasField("done")
    assert {call.submit.engine_epoch for call in ring.calls} == {engine.epoch - 1, engine.epoch}
    assert len(client.lines("peer_restarted")) == 1


async def test_who_took_the_place_of_a_detokenizer_is_told_what_was_given_up(ring, start):
    """The engine goes by the address: rows of the attempt may come to the new one."""
    ring.add_engine()
    detokenizer = ring.add_detokenizer()
    client = await start()
    call = await busy(client, ring)
    ring.script = generate
    detokenizer.epoch += 1
    assert (await rest(call))[-1].HasField("done")
    await client.until(lambda: [(drop.request, drop.attempt) for drop in detokenizer.drops])
    assert [(drop.request, drop.attempt) for drop in detokenizer.drops] == [(ring.calls[0].submit.request, 0)]


async def test_an_abort_whose_engine_dies_still_ends_normally(ring, start):
    async def deaf(call):
        await call.send(start=True)

    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0)
    ring.script = deaf
    events = asyncio.ensure_future(client.events(text_spec(request_id="r")))
    await client.until(lambda: ring.calls)
    await client.generation.Abort(pb.AbortRequest(request_id="r"))
    engine.beating = False
    assert [event.WhichOneof("event") for event in await events] == ["started", "finished", "done"]
    assert (await events)[1].finished.finish_reason == pb.FINISH_REASON_ABORTED
    await client.until(lambda: nothing_left(client))


async def test_requests_wait_for_peers_that_join_late(ring, start, folder):
    ring.add_engine()
    client = await start(wait=False, detokenizers=(f"ipc://{folder}/detok",), peer_wait=60)
    events = asyncio.ensure_future(client.events(text_spec()))
    await asyncio.sleep(0.3)
    assert not events.done()
    ring.add_detokenizer("detok")
    assert (await events)[-1].HasField("done")


async def test_nobody_there_within_the_bound(start):
    client = await start(wait=False, peer_wait=0.1)
    details = await refused(client.generate(text_spec()))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
    assert details.retry is not None
    assert not await client.stream(text_spec()).initial_metadata()
    await client.until(lambda: nothing_left(client))


async def test_draining_peers_get_nothing_new(ring, start):
    draining, other = ring.add_engine("a"), ring.add_engine("b")
    ring.add_detokenizer()
    client = await start()
    draining.draining = True
    await client.until(lambda: [peer.name for peer in client.router.ring.membership.engines.usable] == ["b"])
    await asyncio.gather(*(client.events(text_spec()) for _ in range(4)))
    assert (len(draining.calls), len(other.calls)) == (0, 4)


async def test_heartbeats_from_nowhere_are_counted_and_ignored(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    stranger = ring.add_engine("stranger")
    client = await start(engines=(f"ipc://{ring.folder}/engine",))
    stranger.greeted[client.router.ring.address] = Hello("router", client.router.ring.address)
    await client.until(lambda: client.router.ring.membership.engines.unknown > 1)
    assert [peer.name for peer in client.router.ring.membership.engines.alive] == ["engine"]
    assert len(client.lines("heartbeat_rejected")) == 1


@pytest.mark.slow
async def test_cancels_survive_a_full_lane(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(max_live=1000)
    first = await busy(client, ring)
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


async def test_a_full_lane_is_passed_by(ring, start):
    full, free = ring.add_engine("a"), ring.add_engine("b")
    ring.add_detokenizer()
    client = await start()
    full.reading = False
    peer = next(peer for peer in client.router.ring.membership.engines.alive if peer.name == "a")
    await until_full(peer.lane, lambda: peer.lane.send(Hello("x" * 1000, client.router.ring.address)))
    await asyncio.gather(*(client.events(text_spec()) for _ in range(8)))
    assert (len(full.calls), len(free.calls)) == (0, 8)


async def test_a_paused_router_does_not_take_its_own_sleep_for_silence(ring, start):
    ring.patient = False
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0)
    call = await busy(client, ring)
    time.sleep(2.0)
    await asyncio.sleep(0.3)
    assert not client.lines("peer_lost")
    call.cancel()


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
    # A client that takes 64 KiB ahead and no more, however quick the connection.
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

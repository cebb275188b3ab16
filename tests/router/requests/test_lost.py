"""Engines and detokenizers that fall silent, disconnect, die or restart."""

import asyncio
import contextlib
import os
import socket
import time

import pytest
from grpc import StatusCode

from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.v1 import generation_pb2 as pb
from tests.fakes.lanes import connected
from tests.fakes.ring_scripts import generate, hang
from tests.fakes.rows import text_batch
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


async def test_a_silent_engine_is_lost_and_returns(ring, start):
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
    # The engine was only slow. It handles the Cancel that was sent in the meantime.
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


async def test_a_router_that_replaces_another_reports_no_loss(ring, start):
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


async def test_a_gap_that_names_a_detokenizer_but_not_its_epoch_ends_no_attempt(ring, start):
    """A holder of a detokenizer's key knows the names of others, not their epochs."""
    ring.add_engine()
    detokenizer = ring.add_detokenizer()
    client = await start()
    call = await busy(client, ring)
    liar = connected(Lane(ring.context, client.router.ring.address))
    for _ in range(2):
        assert liar.send(text_batch(detokenizer.name, [], [], epoch=5))
        liar.sent += 10
    await client.until(lambda: client.lines("frames_lost"))
    assert client.lines("frames_lost")[0]["requests"] == 0
    assert client.lines("attempt_given_up") == []
    liar.close()
    call.cancel()


async def test_a_disconnected_and_silent_peer_is_lost_long_before_the_timeout(ring, start, monkeypatch):
    # Sooner than a heartbeat could be missed: a refused connection is enough.
    monkeypatch.setattr("router.peers.peers.HUNG_UP_SECONDS", 600.0)
    first_engine, second_engine = ring.add_engine("dying"), ring.add_engine("other")
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0)
    call = await busy(client, ring)
    (first_call,) = ring.calls
    ring.script = generate
    dead = first_engine if first_call.submit.engine_epoch == first_engine.epoch else second_engine
    await dead.close()
    await client.until(lambda: client.lines("peer_lost"))
    assert (await rest(call))[-1].HasField("done")
    assert len(client.lines("peer_lost")) == 1


@contextlib.contextmanager
def accepting_without_answer(address):
    """Accept connections to this ipc address without answering."""
    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield
        os.unlink(path)


async def heartbeats_for(client, peer, seconds):
    """Wait until heartbeats of the peer have arrived for this number of seconds."""
    arrivals = []
    on_heartbeat, peer.on_heartbeat = (
        peer.on_heartbeat,
        lambda heartbeat, now: (arrivals.append(now), on_heartbeat(heartbeat, now)),
    )
    await client.until(lambda: arrivals and time.monotonic() - arrivals[0] > seconds)


async def test_a_disconnected_peer_that_still_sends_heartbeats_is_not_lost(ring, start, monkeypatch):
    # Long enough for the fakes' heartbeats, which are late on a busy machine.
    monkeypatch.setattr("router.peers.peers.HUNG_UP_SECONDS", 4.0)
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0)
    call = await busy(client, ring)
    (peer,) = client.router.ring.membership.engines.all
    engine.reading = False
    engine.inbox.close()
    with accepting_without_answer(engine.address):
        await client.until(lambda: peer.unreachable)
        await heartbeats_for(client, peer, 5.0)
        assert not client.lines("peer_lost")
    call.cancel()


async def test_a_peer_that_closed_its_inbox_but_sends_heartbeats_is_lost_only_once(ring, start, monkeypatch):
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


async def test_an_unreachable_peer_that_sends_heartbeats_gets_no_new_requests(ring, start):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=600.0, peer_wait=0.2)
    call = await busy(client, ring)
    (peer,) = client.router.ring.membership.engines.all
    engine.reading = False
    engine.inbox.close()
    with accepting_without_answer(engine.address):
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


async def test_the_successor_of_a_detokenizer_gets_drops_of_given_up_attempts(ring, start):
    """The engine sends to the address, so rows of the attempt may reach the new process."""
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
    async def start_and_ignore_cancels(call):
        await call.send(start=True)

    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0)
    ring.script = start_and_ignore_cancels
    events = asyncio.ensure_future(client.events(text_spec(request_id="r")))
    await client.until(lambda: ring.calls)
    await client.generation.Abort(pb.AbortRequest(request_id="r"))
    engine.beating = False
    assert [event.WhichOneof("event") for event in await events] == ["started", "finished", "done"]
    assert (await events)[1].finished.finish_reason == pb.FINISH_REASON_ABORTED
    await client.until(lambda: nothing_left(client))


async def test_a_pause_of_the_router_does_not_count_as_silence_of_peers(ring, start):
    ring.patient = False
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(peer_timeout=1.0)
    call = await busy(client, ring)
    time.sleep(2.0)
    await asyncio.sleep(0.3)
    assert not client.lines("peer_lost")
    call.cancel()

"""Peers that join late, drain, or are unknown to the router."""

import asyncio

import pytest
from grpc import StatusCode

from sluice.wire.heartbeats import Hello
from tests.router.conftest import nothing_left, refused, text_spec


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("router.peers.membership.HELLO_SECONDS", 0.1)


async def test_requests_wait_for_peers_that_join_late(ring, start, folder):
    ring.add_engine()
    client = await start(wait=False, detokenizers=(f"ipc://{folder}/detok",), peer_wait=60)
    events = asyncio.ensure_future(client.events(text_spec()))
    await asyncio.sleep(0.3)
    assert not events.done()
    ring.add_detokenizer("detok")
    assert (await events)[-1].HasField("done")


async def test_no_peer_within_peer_wait(start):
    client = await start(wait=False, peer_wait=0.1)
    details = await refused(client.generate(text_spec()))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
    assert details.retry is not None
    assert not await client.stream(text_spec()).initial_metadata()
    await client.until(lambda: nothing_left(client))


async def test_draining_peers_get_no_new_requests(ring, start):
    draining, serving = ring.add_engine("a"), ring.add_engine("b")
    ring.add_detokenizer()
    client = await start()
    draining.draining = True
    await client.until(lambda: [peer.name for peer in client.router.ring.membership.engines.usable] == ["b"])
    await asyncio.gather(*(client.events(text_spec()) for _ in range(4)))
    assert (len(draining.calls), len(serving.calls)) == (0, 4)


async def test_heartbeats_from_unknown_addresses_are_counted_and_ignored(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    stranger = ring.add_engine("stranger")
    client = await start(engines=(f"ipc://{ring.folder}/engine",))
    stranger.greeted[client.router.ring.address] = Hello("router", client.router.ring.address)
    await client.until(lambda: client.router.ring.membership.engines.unknown > 1)
    assert [peer.name for peer in client.router.ring.membership.engines.alive] == ["engine"]
    assert len(client.lines("heartbeat_rejected")) == 1

"""Successive processes, each with an epoch, at one address."""

import time

import pytest
import zmq
from msgspec.structs import replace

from router.peers.peers import HeartbeatSource, Peers
from sluice.lanes.inbox import Inbox
from sluice.wire.heartbeats import EngineHeartbeat, Hello
from sluice.wire.stats import StepStats
from tests.fakes.lanes import connected

ADDRESS = "ipc:///nowhere/engine"


@pytest.fixture
def peers():
    with zmq.Context() as context:
        peers: Peers[EngineHeartbeat] = Peers(context, lambda _: Hello("router", "ipc:///nowhere/router"), 5.0, 30.0)
        peers.set_addresses({ADDRESS: frozenset({ADDRESS})})
        yield peers
        peers.close()


def test_a_hello_follows_as_soon_as_its_lane_is_connected(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context:
        hello = Hello("router", "ipc:///nowhere/router")
        peers: Peers[EngineHeartbeat] = Peers(context, lambda _: hello, 5.0, 30.0)
        peers.set_addresses({address: frozenset({address})})
        peers.send_hellos()
        inbox = Inbox(context, address, Hello)
        connected(peers.all[0].lane)
        for _ in range(3):
            peers.check_lanes()
        assert inbox.wait(60)
        time.sleep(0.05)
        (received,) = inbox.receive()
        assert received == replace(hello, challenge=peers.all[0].challenge)
        peers.close()
        inbox.close()


def test_late_heartbeats_of_replaced_processes_are_ignored(peers):
    """A router that was paused during two restarts receives heartbeats of three processes, one lane after the other."""

    def receive(epoch: int) -> HeartbeatSource:
        heartbeat = EngineHeartbeat("engine", epoch, ADDRESS, "f", 100, False, StepStats())
        (peer,) = peers.all
        source, former = peers.on_heartbeat(replace(heartbeat, challenge=peer.challenge), 0.0)
        if former is not None:
            former.lane.close()
        return source

    assert [receive(epoch) for epoch in (1, 2, 3)] == [HeartbeatSource.NEW] * 3
    assert [receive(epoch) for epoch in (1, 2, 1, 3)] == [HeartbeatSource.STALE] * 3 + [HeartbeatSource.ALIVE]
    assert [peer.epoch for peer in peers.usable] == [3]


def test_a_heartbeat_of_a_sender_that_does_not_receive_at_the_address_is_ignored(peers):
    """The holder of a key who knows an address neither replaces the peer there nor reports for it."""
    (peer,) = peers.all
    heartbeat = EngineHeartbeat("engine", 1, ADDRESS, "f", 100, False, StepStats(), challenge=peer.challenge)
    # Before the peer's first heartbeat, it may be a late answer to a former router.
    assert peers.on_heartbeat(replace(heartbeat, challenge=5), 0.0) == (HeartbeatSource.STALE, None)
    assert peers.on_heartbeat(heartbeat, 0.0) == (HeartbeatSource.NEW, None)
    forged = [replace(heartbeat, epoch=epoch, draining=True, challenge=5) for epoch in (1, 2)]
    assert [peers.on_heartbeat(each, 0.0) for each in forged] == [(HeartbeatSource.FORGED, None)] * 2
    assert peers.usable == [peer]
    assert peers.on_heartbeat(heartbeat, 0.0) == (HeartbeatSource.ALIVE, None)


def test_losses_that_a_peer_reports_do_not_accumulate(peers):
    (peer,) = peers.all
    heartbeat = EngineHeartbeat("engine", 1, ADDRESS, "f", 100, False, StepStats(), challenge=peer.challenge)
    for start in range(0, 100, 10):
        peers.on_heartbeat(replace(heartbeat, missed=dict.fromkeys(range(start, start + 10), 1)), 0.0)
        assert len(peer.newly_missed()) == 10
        assert peer.newly_missed() == {}
    assert len(peer.missed) == 10

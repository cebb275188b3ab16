"""Successive processes, each with an epoch, at one address."""

import time

import pytest
import zmq

from router.peers.peers import HeartbeatSource, Peers
from sluice.ring.heartbeats import EngineHeartbeat, Hello
from sluice.ring.inbox import Inbox
from sluice.ring.stats import StepStats
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
        assert inbox.receive() == [hello]
        peers.close()
        inbox.close()


def test_late_heartbeats_of_replaced_processes_are_ignored(peers):
    """A router that was paused during two restarts receives heartbeats of three processes, one lane after the other."""

    def receive(epoch: int) -> HeartbeatSource:
        source, former = peers.on_heartbeat(
            EngineHeartbeat("engine", epoch, ADDRESS, "f", 100, False, StepStats()), 0.0
        )
        if former is not None:
            former.lane.close()
        return source

    assert [receive(epoch) for epoch in (1, 2, 3)] == [HeartbeatSource.NEW] * 3
    assert [receive(epoch) for epoch in (1, 2, 1, 3)] == [HeartbeatSource.STALE] * 3 + [HeartbeatSource.ALIVE]
    assert [peer.epoch for peer in peers.usable] == [3]

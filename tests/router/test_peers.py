"""Incarnations behind one address."""

import pytest
import zmq

from router.peers import Heard, Peers
from sluice.ring.beats import EngineBeat, Hello
from sluice.ring.stats import StepStats

ADDRESS = "ipc:///nowhere/engine"


@pytest.fixture
def peers():
    with zmq.Context() as context:
        found: Peers[EngineBeat] = Peers(context, lambda _: Hello("router", "ipc:///nowhere/router"), 5.0, 30.0)
        found.set_addresses({ADDRESS: frozenset({ADDRESS})})
        yield found
        found.close()


def test_late_beats_of_those_that_were_replaced_replace_nobody(peers):
    """A router that slept through two restarts finds beats of all three, each lane's in turn."""

    def hear(epoch: int) -> Heard:
        heard, former = peers.hear(EngineBeat("engine", epoch, ADDRESS, "f", 100, False, StepStats()), 0.0)
        if former is not None:
            former.lane.close()
        return heard

    assert [hear(epoch) for epoch in (1, 2, 3)] == [Heard.NEW] * 3
    assert [hear(epoch) for epoch in (1, 2, 1, 3)] == [Heard.STALE, Heard.STALE, Heard.STALE, Heard.SAME]
    assert [peer.epoch for peer in peers.usable] == [3]

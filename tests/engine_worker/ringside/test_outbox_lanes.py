"""Lanes of an outbox: when they are kept alive, reported as cut off, given up and closed."""

import pytest
import structlog
import zmq

from engine_worker.ringside.outbox import Outbox
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.rows import TokenBatch
from sluice.wire.timing import CUT_OFF_FORGET_SECONDS, CUT_OFF_SECONDS, LANE_FORGET_SECONDS
from tests.engine_worker.ringside.token_rows import OPENED, row
from tests.fakes.clock import Clock
from tests.fakes.lanes import connected, until

A, B = "mem://a", "mem://b"


@pytest.fixture
def outbox(receiver, clock) -> Outbox:
    return Outbox("engine", 7, receiver.open_lane, clock, structlog.get_logger())


def test_each_lane_gets_a_keep_alive_per_second(outbox, receiver, clock):
    outbox.connect(A)
    outbox.connect(B)
    receiver.lanes[B].full = True
    for _ in range(35):
        clock.now += 0.1
        outbox.tick()
    assert receiver.lanes[A].messages == [KeepAlive("engine", 7)] * 3
    assert receiver.lanes[B].messages == []


def advance(outbox: Outbox, clock: Clock, seconds: float) -> None:
    """Let time pass, with a tick each second."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 1.0
        outbox.tick()


def test_a_lane_that_accepts_nothing_for_long_is_reported(outbox, receiver, clock):
    outbox.connect(A)
    outbox.connect(B)
    receiver.lanes[B].full = True
    advance(outbox, clock, CUT_OFF_SECONDS - 1)
    assert outbox.cut_off == []
    advance(outbox, clock, 1)
    assert outbox.cut_off == [B]
    receiver.lanes[B].full = False
    advance(outbox, clock, 1)
    assert outbox.cut_off == []


def test_a_lane_whose_receiver_has_closed_its_socket_is_reported(tmp_path, clock):
    """Over ZeroMQ, until the receiver listens again."""
    with zmq.Context() as context:
        inbox = Inbox(context, f"ipc://{tmp_path}/inbox", TokenBatch | KeepAlive)
        lanes = []

        def open_lane(address: str) -> Lane:
            lanes.append(connected(Lane(context, address)))
            return lanes[0]

        outbox = Outbox("engine", 7, open_lane, clock, structlog.get_logger())
        outbox.connect(inbox.address)
        advance(outbox, clock, 2 * CUT_OFF_SECONDS)
        assert outbox.cut_off == []
        inbox.close()
        until(lambda: not lanes[0].ready())
        advance(outbox, clock, CUT_OFF_SECONDS)
        assert outbox.cut_off == [inbox.address]
        inbox = Inbox(context, inbox.address, TokenBatch | KeepAlive)
        connected(lanes[0])
        outbox.tick()
        assert outbox.cut_off == []
        outbox.close()
        inbox.close()


def test_a_lane_that_is_cut_off_is_reported_for_a_while_after_its_last_request(outbox, receiver, clock):
    outbox.connect(A)
    outbox.disconnect(A)
    receiver.lanes[A].full = True
    advance(outbox, clock, 2 * LANE_FORGET_SECONDS)
    assert outbox.cut_off == [A]
    assert not receiver.lanes[A].closed
    advance(outbox, clock, CUT_OFF_FORGET_SECONDS)
    assert outbox.cut_off == []
    assert receiver.lanes[A].closed


def test_an_outbox_is_flowing_while_its_lane_accepts_messages(outbox, receiver, clock):
    outbox.connect(A)
    outbox.connect(B)
    assert not outbox.flowing(3.0)
    lane = receiver.lanes[A]
    lane.full = True
    outbox.put(A, [row(0, 1)])
    advance(outbox, clock, 2)
    assert outbox.flowing(3.0)
    advance(outbox, clock, 1)
    assert outbox.waiting
    assert not outbox.flowing(3.0)
    lane.full = False
    advance(outbox, clock, 1)
    assert outbox.flowing(3.0)
    outbox.flush()
    assert not outbox.flowing(3.0)


def test_an_unused_lane_is_closed_after_a_while(outbox, receiver, clock):
    outbox.connect(A)
    advance(outbox, clock, 2 * LANE_FORGET_SECONDS)
    lane = receiver.lanes[A]
    assert not lane.closed
    outbox.disconnect(A)
    advance(outbox, clock, LANE_FORGET_SECONDS - 2)
    assert not lane.closed
    advance(outbox, clock, 2)
    assert lane.closed
    outbox.connect(A)
    assert receiver.lanes[A] is not lane


def test_rows_for_a_dead_lane_are_dropped_and_counted(outbox, receiver, clock):
    outbox.connect(A)
    outbox.open(A, OPENED)
    receiver.lanes[A].full = True
    outbox.put(A, [row(0, 1, 2)])
    outbox.put(A, [row(0, 3, sequence=1)])
    advance(outbox, clock, LANE_FORGET_SECONDS - 2)
    assert outbox.lost == 0
    advance(outbox, clock, 3)
    assert outbox.lost == 2
    assert not outbox.waiting


def test_a_lane_that_accepts_messages_again_in_time_loses_nothing(outbox, receiver, clock):
    outbox.connect(A)
    outbox.put(A, [row(0, 1)])
    lane = receiver.lanes[A]
    for _ in range(3):
        lane.full = True
        advance(outbox, clock, LANE_FORGET_SECONDS - 5)
        lane.full = False
        advance(outbox, clock, 2)
    outbox.flush()
    assert outbox.lost == 0
    assert lane.messages[-1].tokens == [1]


def test_closing_counts_rows_that_were_not_sent(outbox, receiver):
    outbox.connect(A)
    receiver.lanes[A].full = True
    outbox.put(A, [row(0, 1)])
    outbox.close()
    assert outbox.lost == 1
    assert receiver.lanes[A].closed


def test_the_number_of_lanes_is_limited_and_idle_ones_are_closed_first(outbox, receiver, monkeypatch):
    monkeypatch.setattr("engine_worker.ringside.outbox.MAX_LANES", 2)
    outbox.connect("mem://1")
    outbox.connect("mem://2")
    with pytest.raises(ValueError, match="2 lanes"):
        outbox.connect("mem://3")
    outbox.connect("mem://2")
    outbox.disconnect("mem://1")
    outbox.connect("mem://3")
    assert receiver.lanes["mem://1"].closed
    assert not receiver.lanes["mem://2"].closed

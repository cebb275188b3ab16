"""Rows of tensors for several routers, over full and dead lanes."""

import pytest
import structlog
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine_worker.ringside.tensor_outbox import MAX_LANES, TensorOutbox
from sluice.lanes.inbox import Gap, Inbox
from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.message import Message
from sluice.wire.tensors import PART_BYTES, TensorBatch
from sluice.wire.timing import KEEP_ALIVE_SECONDS, LANE_FORGET_SECONDS
from tests.fakes.clock import Clock
from tests.fakes.lane import Receiver
from tests.fakes.lanes import connected, until
from tests.fakes.tensors import first_values, tensor_rows

A, B = "mem://a", "mem://b"
BUFFER = 4 * PART_BYTES


def make(receiver: Receiver, clock: Clock) -> TensorOutbox:
    return TensorOutbox("engine", 7, receiver.open_lane, clock, structlog.get_logger(), BUFFER)


@pytest.fixture
def outbox(receiver, clock) -> TensorOutbox:
    return make(receiver, clock)


def batches(receiver: Receiver, address: str) -> list[TensorBatch]:
    return [message for message in receiver.lanes[address].messages if isinstance(message, TensorBatch)]


@given(st.lists(st.integers(1, 400), max_size=20), st.lists(st.booleans(), min_size=20, max_size=20))
def test_all_rows_arrive_in_order_in_messages_of_limited_size(counts, full):
    receiver, position = Receiver(), 0
    outbox = make(receiver, Clock())
    outbox.connect(A)
    for count, is_full in zip(counts, full, strict=False):
        receiver.lanes[A].full = is_full
        outbox.put(A, tensor_rows(position, position + count, width=1000))
        position += count
        outbox.flush()
        assert bool(outbox.waiting) is is_full
        assert outbox.room(A) == max(0, BUFFER - outbox.waiting)
    receiver.lanes[A].full = False
    outbox.flush()
    sent = batches(receiver, A)
    assert first_values([part for batch in sent for part in batch.parts]) == list(range(position))
    assert all(sum(len(part.data) for part in batch.parts) <= PART_BYTES for batch in sent)
    assert (outbox.waiting, outbox.room(A)) == (0, BUFFER)


def test_a_full_lane_delays_only_its_own_router(outbox, receiver):
    outbox.connect(A)
    outbox.connect(B)
    receiver.lanes[A].full = True
    outbox.put(A, tensor_rows(0, 3, width=PART_BYTES // 4))
    outbox.put(A, tensor_rows(3, 5, width=PART_BYTES // 4))
    outbox.put(B, tensor_rows(0, 1))
    outbox.flush()
    assert (outbox.room(A), outbox.room(B)) == (0, BUFFER)
    assert first_values(batches(receiver, B)[0].parts) == [0]
    assert not batches(receiver, A)


def test_a_lane_that_fills_while_rows_are_sent(outbox, receiver):
    outbox.connect(A)
    lane = receiver.lanes[A]
    lane.send = lambda message: False
    outbox.put(A, tensor_rows(0, 1))
    outbox.flush()
    assert outbox.waiting == 8
    del lane.send
    outbox.flush()
    assert (outbox.waiting, len(batches(receiver, A))) == (0, 1)


def test_rows_for_a_dead_router_are_dropped_and_counted(outbox, receiver, clock):
    outbox.connect(A)
    receiver.lanes[A].full = True
    outbox.put(A, tensor_rows(0, 3))
    assert outbox.flowing(1.0)
    clock.now += LANE_FORGET_SECONDS - KEEP_ALIVE_SECONDS
    outbox.tick()
    assert (outbox.waiting, outbox.lost) == (24, 0)
    assert not outbox.flowing(1.0)
    clock.now += KEEP_ALIVE_SECONDS
    with capture_logs() as logs:
        outbox.tick()
    assert (outbox.waiting, outbox.lost) == (0, 24)
    assert [entry["event"] for entry in logs] == ["tensors_lost"]
    # The lane stays open, because a request still uses it.
    assert not receiver.lanes[A].closed


def test_an_unused_lane_is_closed_after_a_while(outbox, receiver, clock):
    outbox.connect(A)
    outbox.connect(A)
    outbox.disconnect(A)
    clock.now += LANE_FORGET_SECONDS
    outbox.tick()
    assert not receiver.lanes[A].closed
    outbox.disconnect(A)
    clock.now += LANE_FORGET_SECONDS
    outbox.tick()
    assert receiver.lanes[A].closed


def test_keep_alives_are_sent_at_their_interval(outbox, receiver, clock):
    outbox.connect(A)
    for _ in range(3):
        outbox.tick()
        clock.now += KEEP_ALIVE_SECONDS
    assert receiver.lanes[A].messages == [KeepAlive("engine", 7)] * 2


class LossyLane(Lane):
    """Loses rows, like a connection that ends before it has transmitted them."""

    def send(self, message: Message) -> bool:
        if isinstance(message, TensorBatch):
            self.sent += 1
            return True
        return super().send(message)


def test_a_keep_alive_reveals_the_loss_of_the_last_rows(tmp_path, clock):
    with zmq.Context() as context:
        inbox = Inbox(context, f"ipc://{tmp_path}/inbox", TensorBatch | KeepAlive)
        lane = connected(LossyLane(context, inbox.address))
        outbox = TensorOutbox("engine", 7, lambda _: lane, clock, structlog.get_logger(), BUFFER)
        outbox.connect(inbox.address)
        clock.now += KEEP_ALIVE_SECONDS
        outbox.tick()
        outbox.put(inbox.address, tensor_rows(0, 2))
        outbox.flush()
        assert (outbox.waiting, outbox.lost) == (0, 0)
        clock.now += KEEP_ALIVE_SECONDS
        outbox.tick()
        received: list[object] = []
        until(lambda: received.extend(inbox.receive()) or len(received) == 3)
        alive = KeepAlive("engine", 7)
        assert received == [alive, Gap(lane.epoch, 1), alive]
        outbox.close()
        inbox.close()


def test_the_number_of_lanes_is_limited(outbox):
    for i in range(MAX_LANES):
        outbox.connect(f"mem://{i}")
    with pytest.raises(ValueError, match="256 lanes are in use"):
        outbox.connect(A)
    with pytest.raises(ValueError, match="not an address"):
        make(Receiver(), Clock()).connect("not an address")


def test_closing_drops_waiting_rows(outbox, receiver):
    outbox.connect(A)
    receiver.lanes[A].full = True
    outbox.put(A, tensor_rows(0, 2))
    outbox.close()
    assert (outbox.lost, receiver.lanes[A].closed) == (16, True)

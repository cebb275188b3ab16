"""Rows for several detokenizers, over full and dead lanes."""

import pytest
import structlog
import zmq
from msgspec.structs import replace

from engine_worker.ringside.outbox import TOKENS_PER_MESSAGE, Outbox
from sluice.ring.errors import FinishReason
from sluice.ring.heartbeats import KeepAlive
from sluice.ring.inbox import Inbox
from sluice.ring.lane import Lane
from sluice.ring.params import TextParams
from sluice.ring.prompt_logprobs import PART_ROWS, parts, row_bytes
from sluice.ring.rows import End, Open, Times, TokenBatch, TokenLogprob, TokenRow
from sluice.ring.timing import CUT_OFF_FORGET_SECONDS, CUT_OFF_SECONDS, LANE_FORGET_SECONDS
from tests.fakes.clock import Clock
from tests.fakes.engine import EngineBench
from tests.fakes.lane import Receiver
from tests.fakes.lanes import connected, until
from tests.fakes.rows import rows_of

A, B = "mem://a", "mem://b"
OPENED = Open(1, 0, 1, TextParams(), "mem://router", 3, 0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def outbox(receiver, clock) -> Outbox:
    return Outbox("engine", 7, receiver.open_lane, clock, structlog.get_logger())


def row(offset: int, *tokens: int, sequence: int = 0, end: End | None = None) -> TokenRow:
    return TokenRow(1, 0, sequence, offset, list(tokens), [TokenLogprob(-float(t), 1, []) for t in tokens], end)


def test_one_message_per_step_and_detokenizer():
    bench = EngineBench()
    for i in range(6):
        bench.submit([i], detokenizer=(A, B)[i % 2], max_tokens=3)
    bench.run()
    assert bench.receiver.batches == 2 * 3


def test_rows_are_joined_while_a_lane_is_full(outbox, receiver):
    outbox.connect(A)
    outbox.open(A, OPENED)
    lane = receiver.lanes[A]
    lane.full = True
    outbox.put(A, [row(0, 5)])
    outbox.flush()
    outbox.put(A, [row(1, 6, 7)])
    outbox.put(A, [row(0, 1, sequence=1)])
    outbox.put(A, [row(3, 8, end=End(FinishReason.EOS, Times(0, 0, 0)))])
    assert outbox.waiting
    lane.full = False
    outbox.flush()
    assert not outbox.waiting
    (batch,) = lane.messages
    assert list(rows_of(batch)) == [
        row(0, 5, 6, 7, 8, end=End(FinishReason.EOS, Times(0, 0, 0))),
        row(0, 1, sequence=1),
    ]
    assert batch.opens == [OPENED]


def test_counts_of_accepted_drafts_are_summed(outbox, receiver):
    outbox.connect(A)
    lane = receiver.lanes[A]
    lane.full = True
    for offset, tokens, accepted in [(0, (5,), 0), (1, (6, 7, 8), 2), (4, (9, 1), 1)]:
        outbox.put(A, [replace(row(offset, *tokens), accepted=accepted)])
    outbox.put(A, [row(6, 2, end=End(FinishReason.EOS, Times(0, 0, 0)))])
    lane.full = False
    outbox.flush()
    (batch,) = lane.messages
    assert batch.accepted == {0: 3}


def test_if_a_ready_lane_refuses_a_message_nothing_is_lost(outbox, receiver):
    outbox.connect(A)
    outbox.open(A, OPENED)
    outbox.put(A, [row(0, 5)])
    lane = receiver.lanes[A]
    lane.full, lane.ready = True, lambda: True
    outbox.flush()
    assert outbox.waiting
    lane.full = False
    outbox.flush()
    assert lane.messages[0].tokens == [5]


def test_a_backlog_is_sent_in_several_messages(outbox, receiver):
    outbox.connect(A)
    outbox.open(A, OPENED)
    half = [1] * (TOKENS_PER_MESSAGE // 2)
    for sequence in range(5):
        outbox.put(A, [row(0, *half, sequence=sequence)])
    outbox.flush()
    assert [len(batch.request) for batch in receiver.lanes[A].messages] == [2, 2, 1]
    assert [len(batch.opens) for batch in receiver.lanes[A].messages] == [1, 0, 0]


def test_opens_of_many_resumed_streams_are_sent_in_several_messages(outbox, receiver):
    half = [1] * (TOKENS_PER_MESSAGE // 2)
    opens = [Open(number, 0, 2, TextParams(), "mem://router", 3, 0, resume={1: half}) for number in range(5)]
    for opened in opens:
        outbox.connect(A)
        outbox.open(A, opened)
        outbox.put(A, [replace(row(0, 5), request=opened.request)])
    outbox.flush()
    messages = receiver.lanes[A].messages
    assert [opened for batch in messages for opened in batch.opens] == opens
    assert max(sum(len(opened.resume[1]) for opened in batch.opens) for batch in messages) == TOKENS_PER_MESSAGE
    assert [sent.request for batch in messages for sent in rows_of(batch)] == [0, 1, 2, 3, 4]
    open_requests = set()
    for batch in messages:
        open_requests |= {opened.request for opened in batch.opens}
        assert open_requests >= set(batch.request)


@pytest.mark.parametrize("n", [1, 4])
def test_an_engine_does_not_wait_for_a_full_lane_and_loses_nothing(n):
    bench = EngineBench()
    slow = bench.submit(range(6), max_tokens=30, n=n, detokenizer=A)
    fast = bench.submit(range(50, 57), max_tokens=30, detokenizer=B)
    bench.step()
    lane = bench.receiver.lanes[A]
    steps = 1
    while bench.engine.live.requests:
        lane.full = steps % 10 != 0
        bench.step()
        steps += 1
    assert steps < 40
    assert bench.output(fast) == bench.expected(fast)
    assert bench.outbox.waiting
    lane.full = False
    bench.step()
    assert not bench.outbox.waiting
    for sequence in range(n):
        assert bench.output(slow, sequence) == bench.expected(slow, sequence)


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


def test_prompt_log_probabilities_are_sent_before_the_first_tokens(outbox, receiver):
    """Even if they take several messages."""
    outbox.connect(A)
    outbox.open(A, OPENED)
    size, count = PART_ROWS, 2 * TOKENS_PER_MESSAGE // PART_ROWS + 1
    for part in parts(1, 0, 0, 1, bytes(count * size * row_bytes(1))):
        outbox.put_prompt_logprobs(A, part)
    outbox.put(A, [row(0, 5)])
    outbox.flush()
    assert not outbox.waiting
    batches = receiver.lanes[A].messages
    assert [len(batch.prompt_logprobs) for batch in batches] == [2, 2, 1]
    assert [len(batch.request) for batch in batches] == [0, 0, 1]
    assert [part.start for batch in batches for part in batch.prompt_logprobs] == [i * size for i in range(count)]

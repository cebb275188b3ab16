"""The messages in which an outbox sends rows to several detokenizers, whose lanes may be full."""

import pytest
import structlog
from msgspec.structs import replace

from engine_worker.ringside.outbox import TOKENS_PER_MESSAGE, Outbox
from sluice.wire.errors import FinishReason
from sluice.wire.params import TextParams
from sluice.wire.prompt_logprobs import PART_ROWS, parts, row_bytes
from sluice.wire.rows import End, Open, Times
from tests.engine_worker.ringside.token_rows import OPENED, row
from tests.fakes.engine import EngineBench
from tests.fakes.rows import rows_of

A, B = "mem://a", "mem://b"


@pytest.fixture
def outbox(receiver, clock) -> Outbox:
    return Outbox("engine", 7, receiver.open_lane, clock, structlog.get_logger())


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

"""Rows of tensors: each is sent once, and no more are computed than there is room for on the lane to their router."""

import pytest

from sluice.wire.errors import FinishReason
from sluice.wire.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, TensorParams
from tests.fakes.engine import EngineBench

OUTPUT = TensorParams(output=(GENERATION_LOGITS,))
CONTEXT = TensorParams((CONTEXT_LOGITS,))
BOTH = TensorParams((CONTEXT_LOGITS,), (GENERATION_LOGITS,))
ROUTER = "mem://router"
PROMPT = list(range(1, 11))
ROW = 8
"""Bytes of a row of the scripted runner's tensors."""

pytestmark = pytest.mark.parametrize("overlap", [False, True])


def rows(bench: EngineBench, request: int, sequence: int = 0, *, context: bool = False) -> range:
    """The rows that were received; the receiver has checked their order."""
    name = CONTEXT_LOGITS if context else GENERATION_LOGITS
    parts = bench.receiver.tensors.get((request, 0, sequence, name, context), [])
    return range(parts[0].start, parts[-1].end) if parts else range(0)


def test_a_full_lane_delays_only_its_own_requests(overlap):
    bench = EngineBench(overlap=overlap, tensor_buffer=4 * ROW)
    waiting = bench.submit(PROMPT, 30, tensors=BOTH)
    bench.step()
    bench.receiver.lanes[ROUTER].full = True
    # It has the same prompt, but does not wait for the blocks of the other request.
    other = bench.submit(PROMPT, 30)
    for _ in range(60):
        bench.step()
        # The rows of a step are counted before it is launched.
        assert bench.tensor_outbox.waiting <= 4 * ROW
    assert bench.ended(other) is FinishReason.LENGTH
    assert bench.ended(waiting) is None
    bench.receiver.lanes[ROUTER].full = False
    bench.run()
    assert bench.output(waiting) == bench.expected(waiting)
    assert (rows(bench, waiting), rows(bench, waiting, context=True)) == (range(30), range(10))


def test_requests_share_the_room_fairly(overlap):
    """No request waits until another has ended."""
    bench = EngineBench(overlap=overlap, tensor_buffer=ROW)
    numbers = [bench.submit([*PROMPT, i], 20, tensors=BOTH) for i in range(3)]
    for _ in range(45):
        bench.step()
    assert all(len(rows(bench, number, context=True)) > 3 for number in numbers)
    bench.run()
    for number in numbers:
        assert (rows(bench, number), rows(bench, number, context=True)) == (range(20), range(11))


def test_the_rows_of_a_prompt_are_sent_once_for_all_outputs(overlap):
    bench = EngineBench(overlap=overlap, max_tokens_per_step=4, max_batch_size=4)
    number = bench.submit(PROMPT, 5, n=3, tensors=BOTH)
    bench.run()
    assert rows(bench, number, context=True) == range(10)
    assert [rows(bench, number, i) for i in range(3)] == [range(5)] * 3


def test_cached_blocks_are_reused_up_to_the_first_requested_row(overlap):
    bench = EngineBench(overlap=overlap)
    bench.submit(PROMPT, 1)
    bench.run()
    whole, half, output = (
        bench.submit(PROMPT, 1, tensors=tensors)
        for tensors in (CONTEXT, TensorParams((CONTEXT_LOGITS,), context_rows=5), OUTPUT)
    )
    bench.run()
    assert [bench.receiver.opens[number, 0].cached_tokens for number in (whole, half, output)] == [0, 4, 8]
    assert rows(bench, half, context=True) == range(5, 10)


def test_a_complete_output_without_its_last_rows(overlap):
    """All tokens were sent, but not all rows. The resumed request sends the missing rows and no token twice."""
    bench = EngineBench(overlap=overlap)
    plain = bench.submit(PROMPT, 6)
    bench.run()
    tokens = bench.output(plain)
    resumed = bench.submit(PROMPT, 6, resume={0: tokens}, tensors=TensorParams((), (GENERATION_LOGITS,), 0, {0: 4}))
    bench.run()
    assert (bench.output(resumed), bench.ended(resumed)) == (tokens, FinishReason.LENGTH)
    assert rows(bench, resumed) == range(4, 6)


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_a_cancelled_resume_without_its_last_rows_keeps_its_tokens(overlap, num_tokens):
    bench = EngineBench(overlap=overlap, tensor_buffer=ROW)
    plain = bench.submit(PROMPT, num_tokens)
    bench.run()
    tokens = bench.output(plain)
    resumed = bench.submit(PROMPT, num_tokens, resume={0: tokens}, tensors=BOTH)
    for _ in range(4):
        bench.step()
    bench.cancel(resumed)
    bench.run()
    assert (bench.output(resumed), bench.ended(resumed)) == (tokens, FinishReason.ABORTED)


def test_outputs_of_one_prompt_with_different_rows(overlap):
    """Of the three first tokens, one was sent with its row, one without, and one was not sent."""
    bench = EngineBench(overlap=overlap)
    plain = bench.submit(PROMPT, 1, n=3)
    bench.run()
    tokens = {i: bench.output(plain, i) for i in range(3)}
    resumed = bench.submit(
        PROMPT,
        1,
        n=3,
        resume={0: tokens[0], 1: tokens[1]},
        tensors=TensorParams((CONTEXT_LOGITS,), (GENERATION_LOGITS,), 0, {0: 1}),
    )
    bench.run()
    assert {i: bench.output(resumed, i) for i in range(3)} == tokens
    assert [rows(bench, resumed, i) for i in range(3)] == [range(0), range(1), range(1)]
    assert rows(bench, resumed, context=True) == range(10)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_when_the_keeper_ends_another_sequence_keeps_the_rows_of_the_prompt(overlap, steps):
    bench = EngineBench(overlap=overlap, max_tokens_per_step=4, max_batch_size=4)
    number = bench.submit(PROMPT, 4, n=2, tensors=BOTH)
    for _ in range(steps):
        bench.step()
    bench.cancel(number, 0)
    bench.run()
    assert bench.ended(number, 0) is FinishReason.ABORTED
    assert bench.output(number, 1) == bench.expected(number, 1)
    assert (rows(bench, number, context=True), rows(bench, number, 1)) == (range(10), range(4))


def test_preemption_does_not_change_rows(overlap):
    bench = EngineBench(overlap=overlap, num_blocks=14, block_reuse=False)
    numbers = [bench.submit([*PROMPT, i], 24, tensors=BOTH) for i in range(3)]
    bench.run()
    assert bench.cache.preemptions
    for number in numbers:
        assert bench.output(number) == bench.expected(number)
        assert (rows(bench, number), rows(bench, number, context=True)) == (range(24), range(11))


@pytest.mark.parametrize("when", ["launch", "before"])
def test_rows_of_a_failed_step_do_not_count_as_in_flight(overlap, when):
    bench = EngineBench(overlap=overlap, tensor_buffer=ROW)
    failed = bench.submit(PROMPT, 6, tensors=BOTH)
    bench.step()
    bench.runner.fail = when
    bench.run()
    assert bench.ended(failed) is FinishReason.ERROR
    number = bench.submit(PROMPT, 6, tensors=BOTH)
    bench.run()
    assert rows(bench, number) == range(6)

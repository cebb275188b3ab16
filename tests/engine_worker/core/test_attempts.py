"""Attempts at a request whose earlier attempt still runs."""

import pytest

from sluice.wire.errors import FinishReason
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")

PROMPT = list(range(10))


@pytest.mark.parametrize("steps", range(6))
def test_the_next_attempt_replaces_a_live_one(steps):
    bench = EngineBench(max_requests=1)
    bench.submit(PROMPT, 9, n=2, request=5)
    for _ in range(steps):
        bench.step()
    outputs = {i: bench.output(5, i) if (5, 0, i) in bench.receiver.streams else [] for i in range(2)}
    bench.submit(PROMPT, 9, n=2, request=5, attempt=1, resume=outputs)
    bench.run()
    for index in range(2):
        assert bench.ended(5, index) is FinishReason.ABORTED
        assert bench.ended(5, index, 1) is FinishReason.LENGTH
        assert bench.output(5, index, 1) == bench.expected(5, index)
    assert bench.dropped == {}
    assert bench.mailbox._submits == {} == bench.mailbox._num_live
    assert bench.outbox._peers["mem://a"].users == 0


def test_of_many_attempts_in_one_step_the_last_runs():
    bench = EngineBench()
    for attempt in range(4):
        bench.submit(PROMPT, 6, request=5, attempt=attempt)
        if attempt == 1:
            bench.cancel(5, attempt=0)
    bench.run()
    assert [bench.ended(5, attempt=attempt) for attempt in range(3)] == [FinishReason.ABORTED] * 3
    assert bench.output(5, attempt=3) == bench.expected(5, attempt=3)


def test_a_cancel_of_one_sequence_does_not_delay_the_next_attempt():
    bench = EngineBench()
    bench.submit(PROMPT, 6, n=2, request=5)
    bench.step()
    bench.cancel(5, 1)
    bench.submit(PROMPT, 6, n=2, request=5, attempt=1, ended=[1])
    bench.run()
    assert [bench.ended(5, i) for i in range(2)] == [FinishReason.ABORTED] * 2
    assert bench.output(5, 0, 1) == bench.expected(5, 0)
    assert bench.dropped == {}


def test_a_late_attempt_is_dropped():
    bench = EngineBench()
    bench.submit(PROMPT, 6, request=5, attempt=2)
    bench.step()
    for attempt in (0, 1, 2):
        bench.submit([1], 6, request=5, attempt=attempt)
    bench.run()
    assert bench.dropped == {"stale": 3}
    assert bench.output(5, attempt=2) == bench.expected(5, attempt=2)
    assert list(bench.receiver.opens) == [(5, 2)]


def test_an_attempt_for_another_epoch_does_not_end_the_current_one():
    bench = EngineBench()
    bench.submit(PROMPT, 6, request=5)
    bench.step()
    bench.submit(PROMPT, 6, request=5, attempt=1, epoch=1)
    bench.run()
    assert bench.dropped == {"other_epoch": 1}
    assert bench.output(5) == bench.expected(5)


def test_the_next_attempt_reuses_the_blocks_of_the_previous_one():
    bench = EngineBench()
    bench.submit(range(40), 20, request=5)
    for _ in range(12):
        bench.step()
    output, computed = bench.output(5), bench.runner.computed
    bench.submit(range(40), 20, request=5, attempt=1, resume={0: output})
    bench.run()
    assert bench.output(5, attempt=1) == bench.expected(5)
    assert bench.runner.computed - computed <= 20 - len(output) + 4 + 2

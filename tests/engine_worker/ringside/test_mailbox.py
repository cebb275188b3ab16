"""Messages between the ring and the core, in their order of arrival. test_intake tests what the core refuses."""

import pytest

from sluice.wire.errors import FinishReason
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")


def test_the_next_request_gets_the_slot_of_a_cancelled_one():
    bench = EngineBench(max_requests=1)
    first = bench.submit([1], max_tokens=50)
    bench.step()
    bench.cancel(first)
    second, third = bench.submit([2]), bench.submit([3])
    bench.run()
    assert bench.ended(first) is FinishReason.ABORTED
    assert bench.output(second) == bench.expected(second)
    assert bench.fault(third) == "OVERLOADED"


def test_the_next_attempt_may_follow_the_cancel_immediately():
    bench = EngineBench()
    bench.submit([1], max_tokens=50, request=5)
    bench.step()
    bench.cancel(5)
    bench.submit([1], max_tokens=6, request=5, attempt=1)
    bench.run()
    assert bench.stream(5).end.reason is FinishReason.ABORTED
    assert bench.stream(5, attempt=1).tokens == bench.expected(5, attempt=1)


def test_several_attempts_and_cancels_that_arrive_together():
    bench = EngineBench()
    for attempt in range(3):
        bench.submit([1], max_tokens=6, request=5, attempt=attempt)
        bench.cancel(5, attempt=attempt)
    last = bench.submit([2], max_tokens=6, request=5, attempt=3)
    bench.run()
    for attempt in range(3):
        assert bench.stream(5, attempt=attempt).end.reason is FinishReason.ABORTED
    assert bench.stream(last, attempt=3).tokens == bench.expected(5, attempt=3)
    assert bench.dropped == {}


def test_a_lane_is_in_use_until_its_last_request_ends():
    bench = EngineBench()
    request = bench.submit([1], max_tokens=4, n=3)
    refused = bench.submit([], n=2)
    bench.step()
    assert bench.outbox._peers["mem://a"].users == 1
    bench.run()
    assert bench.outbox._peers["mem://a"].users == 0
    assert bench.fault(refused, 1) == "INVALID_ARGUMENT"
    assert [bench.ended(request, i) for i in range(3)] == [FinishReason.LENGTH] * 3


def test_without_a_descriptor_for_a_lane_requests_are_refused_and_it_is_reported_immediately():
    bench = EngineBench()
    bench.receiver.lanes_open = False
    refused = bench.submit([1], n=2)
    bench.step()
    assert bench.outbox.cut_off == ["mem://a"]
    assert (bench.mailbox.refused, bench.dropped) == ({"OVERLOADED": 1}, {})
    assert not bench.engine.live.requests
    bench.clock.now += 1
    bench.outbox.tick()
    assert bench.outbox.cut_off == ["mem://a"]
    bench.receiver.lanes["mem://a"].open = True
    bench.run()
    assert [bench.fault(refused, i) for i in range(2)] == ["OVERLOADED"] * 2
    bench.clock.now += 1
    bench.outbox.tick()
    assert bench.outbox.cut_off == []
    request = bench.submit([2])
    bench.run()
    assert bench.output(request) == bench.expected(request)

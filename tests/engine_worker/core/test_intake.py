"""Requests that are refused, and messages that are dropped."""

import pytest

from sluice.wire.errors import FinishReason
from tests.fakes.engine import EPOCH, EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": range(30), "max_tokens": 3}, "CONTEXT_OVERFLOW"),
        ({"prompt": range(90), "max_tokens": 1}, "CONTEXT_OVERFLOW"),
        ({"prompt": [], "max_tokens": 1}, "INVALID_ARGUMENT"),
        ({"prompt": [1], "max_tokens": 0}, "INVALID_ARGUMENT"),
        ({"prompt": [1, 97]}, "INVALID_ARGUMENT"),
        ({"prompt": [-1, 2]}, "INVALID_ARGUMENT"),
    ],
)
def test_a_refusal_does_not_affect_other_requests(fields, code):
    bench = EngineBench(num_blocks=8)
    neighbour = bench.submit([1, 2, 3])
    bench.step()
    request = bench.submit(**fields, n=3)
    bench.step()
    for sequence in range(3):
        assert bench.fault(request, sequence) == code
        assert bench.output(request, sequence) == []
    assert bench.receiver.opens[request, 0].n == 3
    bench.run()
    assert bench.output(neighbour) == bench.expected(neighbour)


def test_a_request_that_just_fits_is_accepted():
    bench = EngineBench(num_blocks=8)
    request = bench.submit(range(29), max_tokens=3, n=4)
    bench.run()
    assert [bench.ended(request, i) for i in range(4)] == [FinishReason.LENGTH] * 4


def test_max_requests_is_respected():
    bench = EngineBench(max_requests=3)
    requests = [bench.submit([i]) for i in range(5)]
    bench.step()
    assert [bench.fault(request) for request in requests[3:]] == ["OVERLOADED"] * 2
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests[:3])


def test_a_draining_engine_refuses_new_requests_and_finishes_the_others():
    bench = EngineBench()
    request = bench.submit([1])
    bench.step()
    bench.mailbox.draining = True
    late = bench.submit([2])
    bench.run()
    assert bench.fault(late) == "DRAINING"
    assert bench.output(request) == bench.expected(request)


def test_a_duplicate_of_a_live_attempt_is_dropped():
    bench = EngineBench()
    request = bench.submit([1, 2], request=9)
    bench.step()
    bench.submit([3, 4], request=9)
    bench.run()
    assert bench.output(request) == bench.expected(request)
    assert bench.dropped == {"stale": 1}


def test_messages_for_another_epoch_are_dropped():
    bench = EngineBench()
    request = bench.submit([1], epoch=EPOCH)
    bench.submit([1], epoch=EPOCH - 1)
    bench.cancel(request, epoch=EPOCH - 1)
    bench.run()
    assert bench.dropped == {"other_epoch": 2}
    assert len(bench.receiver.streams) == 1
    assert bench.output(request) == bench.expected(request)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"detokenizer": "nowhere"}, "bad_address"), ({"n": 0}, "invalid"), ({"n": 129}, "invalid")],
)
def test_messages_that_cannot_be_answered_are_counted(fields, reason):
    bench = EngineBench()
    bench.submit([1], **fields)
    bench.run()
    assert bench.dropped == {reason: 1}
    assert not bench.engine.live.requests

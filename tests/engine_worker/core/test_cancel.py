"""A cancel in any state yields one terminal row, releases all blocks, and does not affect other requests."""

import pytest

from sluice.wire.errors import Fault, FinishReason
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")


def finish(bench: EngineBench, request: int, neighbour: int) -> None:
    bench.run()
    n = bench.specs[request, 0].n
    assert [bench.ended(request, i) for i in range(n)] == [FinishReason.ABORTED] * n
    for i in range(n):
        tokens = bench.output(request, i)
        assert tokens == bench.expected(request, i)[: len(tokens)]
    assert bench.output(neighbour) == bench.expected(neighbour)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", range(12))
def test_at_any_step(steps, n):
    """The cancel arrives while the request waits for its neighbour, computes its context, or generates."""
    bench = EngineBench(max_batch_size=4, max_tokens_per_step=5)
    neighbour = bench.submit(range(30, 43), max_tokens=12)
    request = bench.submit(range(13), max_tokens=20, n=n)
    for _ in range(steps):
        bench.step()
    bench.cancel(request)
    finish(bench, request, neighbour)
    assert bench.dropped == {}


def test_in_the_same_step_as_its_submit():
    bench = EngineBench()
    neighbour, request = bench.submit([1]), bench.submit([2])
    bench.cancel(request)
    finish(bench, request, neighbour)


def test_while_preempted():
    bench = EngineBench(num_blocks=8, max_batch_size=2)
    neighbour = bench.submit(range(8), max_tokens=22)
    request = bench.submit(range(20, 28), max_tokens=22)
    while not bench.engine.stats.latest.paused_requests:
        bench.step()
    bench.cancel(request)
    finish(bench, request, neighbour)


def test_cancels_of_ended_and_unknown_requests_are_counted():
    bench = EngineBench()
    request = bench.submit([1])
    bench.run()
    bench.cancel(request)
    bench.cancel(request)
    bench.cancel(77)
    later = bench.submit([2])
    bench.cancel(later, attempt=1)
    bench.cancel(later, sequence=5)
    bench.cancel(later, sequence=-1)
    bench.run()
    assert bench.dropped == {"unknown_cancel": 6}
    assert bench.ended(request) is bench.ended(later) is FinishReason.LENGTH


@pytest.mark.parametrize("sequence", range(3))
@pytest.mark.parametrize("steps", range(8))
def test_one_sequence_of_several(steps, sequence):
    """Sequence 0 may be cancelled while it computes the prompt for the others."""
    bench = EngineBench(max_tokens_per_step=8)
    request = bench.submit(range(22), max_tokens=9, n=3)
    for _ in range(steps):
        bench.step()
    bench.cancel(request, sequence)
    bench.run()
    assert bench.ended(request, sequence) is FinishReason.ABORTED
    for other in {0, 1, 2} - {sequence}:
        assert bench.output(request, other) == bench.expected(request, other)
        assert bench.ended(request, other) is FinishReason.LENGTH


def test_the_last_cancelled_sequence_ends_the_request():
    bench = EngineBench()
    request = bench.submit(range(6), max_tokens=50, n=2)
    bench.step()
    bench.cancel(request, 1)
    bench.cancel(request, 1)
    bench.step()
    assert bench.engine.live.requests
    bench.cancel(request, 0)
    bench.run()
    assert [bench.ended(request, i) for i in range(2)] == [FinishReason.ABORTED] * 2


def test_the_number_is_free_again_after_the_end():
    bench = EngineBench()
    bench.submit([1], max_tokens=50, request=5)
    bench.step()
    bench.cancel(5)
    bench.submit([1], max_tokens=3, request=5, attempt=1)
    bench.run()
    assert bench.stream(5, attempt=0).end.reason is FinishReason.ABORTED
    assert bench.stream(5, attempt=1).tokens == bench.expected(5, attempt=1)


def test_64_requests_in_one_step():
    bench = EngineBench(num_blocks=200, max_batch_size=64, max_tokens_per_step=128)
    requests = [bench.submit(range(i, i + 9), max_tokens=40) for i in range(64)]
    for _ in range(8):
        bench.step()
    for request in requests:
        bench.cancel(request)
    bench.step()
    assert bench.engine.stats.latest.free_kv_blocks == 200
    assert all(bench.ended(request) is FinishReason.ABORTED for request in requests)


def test_requests_of_a_dead_router_end_and_others_continue():
    bench = EngineBench()
    orphan, other = bench.submit([1, 2, 3], 50), bench.submit([4, 5], 5)
    bench.step()
    assert bench.engine.end_where(lambda spec: spec.request == orphan, Fault("ROWS_LOST", "so")) == 1
    bench.run()
    assert bench.fault(orphan) == "ROWS_LOST"
    assert bench.output(other) == bench.expected(other)

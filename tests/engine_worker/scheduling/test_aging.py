"""Priority aging of waiting requests, and time limits while they wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.errors import FinishReason
from sluice.wire.params import place_in_line
from tests.fakes.engine import EngineBench

LOW, HIGH = 1, 3


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1000)), min_size=2), st.floats(0.1, 100))
def test_a_priority_class_equals_the_aging_time(arrivals, aging):
    places = {(priority, at): place_in_line(priority, at, aging) for priority, at in arrivals}
    for (higher, at), place in places.items():
        for (lower, earlier), other in places.items():
            if higher == lower and at > earlier:
                assert place >= other
            # With a tolerance for rounding.
            if higher > lower and at - earlier > (higher - lower) * aging + 1e-6:
                assert place > other
            if higher > lower and at - earlier < (higher - lower) * aging - 1e-6:
                assert place < other


def flooded(aging: float, policy_steps: int = 120) -> tuple[EngineBench, int]:
    """A request of low priority, and two of high priority per step; each takes one step and the batch has one slot."""
    bench = EngineBench(max_batch_size=1, priority_aging_seconds=aging, max_requests=1000)
    bench.submit([1], max_tokens=1, priority=HIGH)
    low = bench.submit([2], max_tokens=1, priority=LOW)
    for number in range(policy_steps):
        bench.submit([3 + number % 90], max_tokens=1, priority=HIGH)
        bench.submit([3 + number % 90], max_tokens=1, priority=HIGH)
        bench.step()
    return bench, low


def test_aging_prevents_starvation():
    """A step takes 10 ms and two requests arrive in each: 2 classes of 0.2 s are 40 steps, so 80 requests go first."""
    bench, low = flooded(aging=0.2)
    assert bench.ended(low) is FinishReason.LENGTH
    order = [key[0] for key, stream in bench.receiver.streams.items() if stream.end]
    assert 79 <= order.index(low) <= 84


def test_without_aging_higher_priorities_always_go_first():
    bench, low = flooded(aging=0.0)
    assert (low, 0, 0) not in bench.receiver.streams
    bench.run()
    assert bench.output(low) == bench.expected(low)


def test_a_higher_class_goes_first_even_if_it_arrived_later():
    bench = EngineBench(max_batch_size=1, priority_aging_seconds=30)
    bench.submit([1], max_tokens=3, request=1)
    bench.step()
    bench.submit([2], max_tokens=1, request=2, priority=LOW)
    bench.step()
    bench.submit([3], max_tokens=1, request=3, priority=HIGH)
    bench.run()
    assert [key[0] for key in bench.receiver.streams] == [1, 3, 2]


@pytest.mark.parametrize("policy_batch", [1, 4])
def test_a_time_limit_holds_while_a_request_waits(policy_batch):
    bench = EngineBench(max_batch_size=policy_batch, num_blocks=8)
    running = bench.submit(range(8), max_tokens=24)
    bench.step()
    waiting = bench.submit(range(40, 60), max_tokens=4, time_limit=0.05)
    steps = 0
    while bench.engine.live.requests and (waiting, 0, 0) not in bench.receiver.streams:
        bench.step()
        steps += 1
    assert bench.ended(waiting) is FinishReason.TIME_LIMIT
    assert bench.output(waiting) == []
    assert 5 <= steps <= 7
    bench.run()
    assert bench.output(running) == bench.expected(running)

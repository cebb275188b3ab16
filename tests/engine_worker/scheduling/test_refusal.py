"""A blocked sequence is not tried in every step, and is not delayed by that."""

import pytest

from sluice.settings.engine import SchedulerNames
from tests.fakes.engine import EngineBench

POLICIES = ("max_utilization", "guaranteed_no_evict")


def full(policy: str) -> tuple[EngineBench, int, int]:
    """A running request, and a waiting one for which it leaves no room."""
    bench = EngineBench(num_blocks=20, schedulers=SchedulerNames(policy), block_reuse=False)
    running = bench.submit(range(30), max_tokens=40)
    bench.step()
    waiting = bench.submit(range(40, 90), max_tokens=4)
    return bench, running, waiting


@pytest.mark.parametrize("policy", POLICIES)
def test_a_blocked_request_begins_right_after_another_ends(policy):
    bench, running, waiting = full(policy)
    while bench.ended(running) is None:
        bench.step()
        assert len(bench.cache.holders) <= 1
    bench.step()
    (holder,) = bench.cache.holders
    assert holder.request.submit.request == waiting
    bench.run()
    assert bench.output(waiting) == bench.expected(waiting)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_blocked_request_is_tried_rarely(policy, monkeypatch):
    bench, _, waiting = full(policy)
    tried = []
    forecast = bench.cache.forecast

    def watched():
        made = forecast()
        growth, made.growth = made.growth, lambda sequence, tokens: tried.append(sequence) or growth(sequence, tokens)
        return made

    monkeypatch.setattr(bench.cache, "forecast", watched)
    for _ in range(36):
        bench.step()
    assert 4 <= len([s for s in tried if s.request.submit.request == waiting]) <= 12


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_higher_priority_goes_before_a_blocked_one(policy):
    bench, running, waiting = full(policy)
    bench.step()
    urgent = bench.submit([95], max_tokens=1, priority=3)
    bench.step()
    assert bench.output(urgent) == bench.expected(urgent)
    assert bench.ended(running) is None
    bench.cancel(running)
    bench.run()
    assert bench.output(waiting) == bench.expected(waiting)

"""The snapshot that the beats carry. A step's numbers are tested with batching."""

import pytest

from engine_worker.stats import Rate
from tests.fakes.engine import EngineBench


def test_the_rate_of_short_steps_is_that_of_the_last_second():
    rate = Rate()
    for step in range(300):
        rate.add(step * 0.01, (step + 1) * 0.01, 5)
    assert rate.at(3.0) == pytest.approx(500, rel=0.02)
    assert rate.at(3.5) == pytest.approx(250, rel=0.02)
    assert rate.at(4.5) == 0.0


def test_the_rate_of_a_long_step_is_spread_over_it():
    rate = Rate()
    rate.add(0.0, 4.0, 8)
    assert rate.at(4.0) == 2.0


def test_a_snapshot_never_changes_and_an_idle_engine_makes_none():
    bench = EngineBench()
    bench.submit([1], max_tokens=2)
    bench.step()
    first = bench.engine.stats.latest
    bench.run()
    assert (first.iteration, first.active_requests) == (1, 1)
    bench.clock.now += 5
    bench.step()
    idle = bench.engine.stats.latest
    assert (idle.iteration, idle.active_requests, idle.tokens_per_second) == (2, 0, 0.0)
    bench.step()
    assert bench.engine.stats.latest is idle

"""Services are killed at random while streams of every kind run. `python -m tests.chaos.kills` is the long one."""

import pytest

from bench.deaths.asked import KINDS
from bench.deaths.run import Plan, measure


@pytest.mark.timeout(600)
def test_no_stream_fails_and_none_differs():
    plan = Plan(streams=2 * len(KINDS), kills=4, seconds_between=2.0, max_tokens=120)
    result = measure(plan)
    assert sum(result.killed.values()) == plan.kills
    assert result.streams >= plan.streams
    assert (result.failed, result.wrong, result.faults) == (0, 0, [])

"""Services are killed at random while streams of every kind run. `python -m tests.chaos.kills` is the long one."""

import pytest

from bench.deaths.kills import KillPlan, measure
from bench.deaths.streams import KINDS


@pytest.mark.timeout(600)
def test_no_stream_fails_and_none_differs(tmp_path):
    plan = KillPlan(streams=2 * len(KINDS), kills=4, seconds_between=2.0, max_tokens=120)
    result = measure(plan, tmp_path, lambda _: None)
    assert sum(result.killed.values()) == plan.kills
    assert result.streams >= plan.streams
    assert (result.failed, result.wrong, result.faults) == (0, 0, [])

"""Services are killed at random while streams of every kind run. `python -m tests.chaos.kills` is the long one."""

import pytest
from msgspec.structs import replace

from bench.deaths.kills import WITH_ADAPTERS, WITH_IMAGES, KillPlan, measure
from bench.deaths.requests import KINDS


@pytest.mark.timeout(600)
def test_no_stream_fails_and_none_differs(tmp_path):
    with_adapters = replace(WITH_ADAPTERS, streams=14, kills=3)
    with_images = replace(WITH_IMAGES, streams=10, kills=3, seconds_between=2.0)
    plan = KillPlan(2 * len(KINDS), kills=4, max_tokens=120, adapters=with_adapters, images=with_images)
    parts = measure(plan, tmp_path, lambda _: None).parts
    assert len(parts) == 3
    for result in parts:
        assert sum(result.killed.values()) == result.plan.kills
        assert result.streams >= result.plan.streams
        assert (result.failed, result.wrong, result.faults) == (0, 0, [])

"""Engines with pool files and small pools are killed. `python -m tests.chaos.evictions` does so for longer."""

import pytest
from msgspec.structs import replace

from bench.deaths.evicting import PLAN, measure


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_of_evicting_engines_are_right_and_nothing_is_left_in_memory(tmp_path):
    result = measure(replace(PLAN, kills=6), tmp_path, lambda _: None)
    assert sum(result.kills.killed.values()) == 6
    assert result.faults == []

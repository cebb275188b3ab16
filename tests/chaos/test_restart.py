"""Every service is restarted and one engine freezes, while streams run without errors, repetitions or wrong text."""

import pytest

from bench.deaths.freeze import Leftovers
from bench.deaths.restart import GOES_ON, QUICK, QUIET, RESTARTS, STOPPED, measure


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_are_not_affected_by_restarts_and_a_frozen_engine(tmp_path):
    steps = []
    result = measure(QUICK, tmp_path, steps.append)
    assert steps
    assert [phase.name for phase in result.phases] == [QUIET, RESTARTS, STOPPED, GOES_ON]
    for phase in result.phases:
        assert phase.streams
        assert (phase.failed, phase.wrong, phase.repeated, phase.faults) == (0, 0, 0, [])
    assert [restart.service for restart in result.restarts] == [
        *("engine-0", "engine-1", "detok-0", "detok-1", "detok-2", "router-0", "router-1")
    ]
    assert {restart.ending for restart in result.restarts} == {"ended with code 0"}
    assert result.frozen.held >= result.frozen.late
    assert result.frozen.new
    assert result.left == Leftovers([])

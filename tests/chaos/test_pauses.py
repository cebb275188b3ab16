"""Streams whose engine or detokenizer is killed pause and then continue."""

import pytest

from bench.deaths.pauses import QUICK, measure


@pytest.mark.long
def test_streams_pause_when_a_service_is_killed_and_none_fails(tmp_path):
    result = measure(QUICK, tmp_path, lambda _: None)
    assert result.failed == 0
    assert [bool(pauses.seconds) for pauses in result.pauses] == [True, True]
    # How long the pauses are depends on the machine, so that it is left to the benchmark.
    assert all(second > 0.0 for pauses in result.pauses for second in pauses.seconds)

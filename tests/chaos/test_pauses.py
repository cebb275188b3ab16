"""Streams whose engine or detokenizer is killed go on, and none of them fails."""

from bench.deaths.pauses import QUICK, measure


def test_streams_pause_and_none_fails(tmp_path):
    found = measure(QUICK, tmp_path, lambda _: None)
    assert found.failed == 0
    assert [bool(pauses.seconds) for pauses in found.pauses] == [True, True]
    # Some time passes without text; how much, on a busy machine, is not for a test.
    assert all(second > 0.0 for pauses in found.pauses for second in pauses.seconds)

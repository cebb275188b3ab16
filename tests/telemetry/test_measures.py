"""Tokens per second over the last second."""

import pytest

from sluice.telemetry.measures import Rate


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

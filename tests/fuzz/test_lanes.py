"""Mutated frames into every inbox, as many as a test has time for; `python -m tests.fuzz.lanes` for more."""

import pytest

from tests.fuzz.lanes import TARGETS, Watch

FRAMES = 20_000
GROWTH_MIB = 40
"""What caches of bounded size may still take after so short a warm-up."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.timeout(600)
def test_nothing_is_raised_and_nobody_is_harmed(target):
    watch = Watch(FRAMES)
    TARGETS[target](FRAMES, 4, watch.tick)
    assert watch.grown() < GROWTH_MIB

"""Mutated frames into every inbox, as many as a test has time for; `python -m tests.fuzz.lanes` for more."""

from typing import get_args

import pytest

from sluice.ring.wire import ToDetokenizer, ToEngine, ToRouter
from tests.fuzz import detokenizer, engine, router
from tests.fuzz.lanes import TARGETS, Watch

FRAMES = 20_000
GROWTH_MIB = 40
"""What caches of bounded size may still take after so short a warm-up."""


@pytest.mark.parametrize(
    ("templates", "kinds"),
    [
        (engine.templates(1, "ipc://sink"), ToEngine),
        (detokenizer.templates("ipc://router"), ToDetokenizer),
        (router.templates("ipc://engine", "ipc://detok"), ToRouter),
    ],
)
def test_there_is_a_template_for_each_kind_of_message(templates, kinds):
    assert {type(template) for template in templates} == set(get_args(kinds))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.timeout(600)
def test_nothing_is_raised_and_nobody_is_harmed(target):
    watch = Watch(FRAMES)
    TARGETS[target](FRAMES, 4, watch.tick)
    assert watch.grown() < GROWTH_MIB

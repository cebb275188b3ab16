"""Mutated frames to every inbox, as many as a test has time for. `python -m tests.fuzz.lanes` sends more."""

from typing import get_args

import pytest

from sluice.wire.requests import ToDetokenizer, ToEngine, ToRouter
from tests.fuzz import detokenizer, engine, router
from tests.fuzz.lanes import TARGETS, Watch

FRAMES = 10_000
GROWTH_MIB = 40
"""Caches of bounded size may still grow by this much after such a short warm-up."""


@pytest.mark.parametrize(
    ("templates", "kinds"),
    [
        (engine.templates(1, "ipc://sink"), ToEngine),
        (detokenizer.templates("ipc://router"), ToDetokenizer),
        (router.templates("ipc://engine", "ipc://detok"), ToRouter),
    ],
)
def test_every_kind_of_message_has_a_template(templates, kinds):
    assert {type(template) for template in templates} == set(get_args(kinds))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.timeout(600)
def test_mutated_frames_raise_nothing_and_harm_no_stream(target):
    watch = Watch(FRAMES)
    TARGETS[target](FRAMES, 4, watch.tick)
    assert watch.grown() < GROWTH_MIB

"""Some seeds of the simulation. `python -m tests.sim.run` plays ten thousand, and each one again."""

import pytest

from tests.sim.run import judged
from tests.sim.scenario import MOST_POISON_DEATHS, Scenario

PARTS = 5
SEEDS = 100


@pytest.mark.parametrize("part", range(PARTS))
def test_every_client_gets_what_it_gets_undisturbed_and_nothing_is_left(part):
    found = [judged(seed) for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)]
    assert {each.seed: each.wrong for each in found if each.wrong} == {}
    assert sum(each.faults for each in found) > 2 * len(found)
    assert sum(each.resumed for each in found) > len(found) // 2


def test_tokens_that_were_lost_with_two_engines_do_not_clear_a_suspect():
    found = Scenario.of(1455).play(True)
    assert (found.poison_deaths, found.stories[-1].error) == (MOST_POISON_DEATHS, "POISON")


@pytest.mark.parametrize("seed", [5, 89, 95])
def test_a_seed_is_the_same_each_time(seed):
    first, second = (Scenario.of(seed).play(True) for _ in range(2))
    assert first.stories == second.stories
    assert (first.harmed, first.resumed) == (second.harmed, second.resumed)

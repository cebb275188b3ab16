"""Some seeds of the simulation. `python -m tests.sim.run` runs ten thousand, or repeats one."""

import pytest

from tests.sim.run import outcome_of
from tests.sim.scenario import MOST_POISON_DEATHS, Scenario

PARTS = 5
SEEDS = 100


@pytest.mark.parametrize("part", range(PARTS))
def test_clients_receive_what_they_would_undisturbed_and_no_state_is_left(part):
    outcomes = [outcome_of(seed) for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)]
    assert {outcome.seed: outcome.wrong for outcome in outcomes if outcome.wrong} == {}
    # The scenarios were eventful.
    assert sum(outcome.faults for outcome in outcomes) > 2 * len(outcomes)
    assert sum(outcome.resumed for outcome in outcomes) > len(outcomes) // 2


def test_tokens_that_were_lost_with_two_engines_do_not_clear_a_suspect():
    played = Scenario.of(1455).play(True)
    assert (played.poison_deaths, played.stories[-1].error) == (MOST_POISON_DEATHS, "POISON")


@pytest.mark.parametrize("seed", [5, 89, 95])
def test_a_seed_has_the_same_outcome_each_time(seed):
    first, second = (Scenario.of(seed).play(True) for _ in range(2))
    assert first.stories == second.stories
    assert (first.harmed, first.resumed) == (second.harmed, second.resumed)

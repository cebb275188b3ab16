"""Some seeds of the simulation. `python -m tests.sim.run` runs ten thousand, or repeats one."""

import pytest

from tests.sim.judge import MAX_POISON_DEATHS
from tests.sim.run import verdict_on
from tests.sim.scenario import Scenario

PARTS = 10
SEEDS = 100


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.long) if part else part for part in range(PARTS)]
)
def test_clients_receive_what_they_would_undisturbed_and_no_state_is_left(part):
    verdicts = [verdict_on(seed) for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)]
    assert {verdict.seed: verdict.wrong for verdict in verdicts if verdict.wrong} == {}
    # The scenarios were eventful.
    assert sum(verdict.faults for verdict in verdicts) > len(verdicts)
    assert sum(verdict.resumed for verdict in verdicts) > len(verdicts) // 2


def test_tokens_that_were_lost_with_two_engines_do_not_clear_a_suspect():
    played = Scenario.of(1455).play(True)
    assert (played.poison_deaths, played.transcripts[-1].error) == (MAX_POISON_DEATHS, "POISON")


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (89, 95, 20, 46))])
def test_a_seed_has_the_same_outcome_each_time(seed):
    first, second = (Scenario.of(seed).play(True) for _ in range(2))
    assert first.transcripts == second.transcripts
    assert (first.harmed, first.resumed) == (second.harmed, second.resumed)

"""Prefill and decode apart: one of the two engines is killed at each moment of the hand-overs of some requests."""

from functools import cache
from pathlib import Path

import pytest

from sluice.host.memory_files import is_in_memory
from sluice.v1 import generation_pb2 as pb
from tests.sim.clients import ClientPlan
from tests.sim.inputs import ENGINES, Fault
from tests.sim.judge import differences
from tests.sim.scenario import Scenario
from tests.sim.simulation import Outcome

REQUESTS = 6
MOMENTS = [round(1.5 + 0.01 * i, 2) for i in range(40)]
"""In seconds. The requests arrive at 1.5 s, and end before 2 s if nothing is killed."""


def plan(number: int) -> ClientPlan:
    spec = pb.GenerationSpec()
    spec.token_ids.ids.extend((number * 31 + 7 * i) % 97 for i in range(20 + number))
    spec.n = 1 + number % 2
    spec.sampling.seed, spec.stopping.max_tokens, spec.stopping.ignore_eos = number, 1 if number == 5 else 12, True
    spec.output.token_ids, spec.output.logprobs = True, 1
    if number == 3:
        spec.stopping.stop.append("end")
    return ClientPlan(1.5 + 0.02 * number, spec)


def scenario(*faults: Fault, files: bool = False) -> Scenario:
    """`files`: with pool files, so that engines copy the blocks of requests that are handed over."""
    requests = [plan(number) for number in range(REQUESTS)]
    phases = dict(zip(ENGINES, ("prefill", "decode"), strict=True))
    same = dict.fromkeys(ENGINES, (0, 0))
    return Scenario(2 if files else 1, "max_utilization", False, requests, list(faults), same, phases=phases)


@cache
def undisturbed() -> Outcome:
    """By engines that compute everything."""
    return scenario().play(False)


def wrong(outcome: Outcome) -> list[str]:
    pairs = zip(outcome.transcripts, undisturbed().transcripts, strict=True)
    return [problem for actual, expected in pairs for problem in (*actual.violations, *differences(actual, expected))]


def test_requests_are_handed_over_and_nothing_is_left():
    outcome = scenario().play(True)
    # The one with a single token is not.
    assert (outcome.handovers, outcome.resumed) == (REQUESTS - 1, REQUESTS - 1)
    assert (wrong(outcome), outcome.leftovers) == ([], [])
    assert (undisturbed().handovers, undisturbed().resumed) == (0, 0)
    with_files = scenario(files=True).play(True)
    assert (wrong(with_files), with_files.leftovers) == ([], [])
    assert (with_files.copied > 0, outcome.copied) == (is_in_memory(Path("/dev/shm")), 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("moments", [MOMENTS[::4], pytest.param(MOMENTS, marks=pytest.mark.long)], ids=["few", "all"])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_side_is_killed_at_each_moment(engine, moments):
    kills = {at: Fault(at, "kill", engine, 0.5) for at in moments}
    outcomes = {at: scenario(kill, files=i % 2 == 0).play(True) for i, (at, kill) in enumerate(kills.items())}
    problems = {at: [*wrong(outcome), *outcome.leftovers] for at, outcome in outcomes.items()}
    assert {at: found for at, found in problems.items() if found} == {}
    assert sum(outcome.faults for outcome in outcomes.values()) > len(moments) // 2
    # Some deaths came after all prompts were handed over, some before.
    assert len({outcome.resumed for outcome in outcomes.values()}) > 1

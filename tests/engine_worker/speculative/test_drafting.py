"""A step has drafts if their expected gain exceeds their cost."""

import pytest

from engine_worker.speculative.cost import DraftCost
from engine_worker.speculative.drafter import Drafter
from engine_worker.speculative.lookup import INTERVAL, Lookup
from sluice.wire.params import Speculation
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.scripted_tokens import continuation

PROMPT = list(range(20))
STEPS = 400
DRAFTS = Speculation(max_draft_tokens=3)


@pytest.fixture
def bench():
    return EngineBench(num_blocks=64, tokens_per_block=8)


@pytest.fixture
def searches(bench, monkeypatch):
    """The times of all searches; each takes as long as a step."""
    times = []

    def propose(drafter, *arguments):
        times.append(bench.clock.now)
        bench.clock.now += 0.01
        return original(drafter, *arguments)

    original = Drafter.propose
    monkeypatch.setattr(Drafter, "propose", propose)
    return times


def generate(bench, **fields):
    spec = spec_of(PROMPT, STEPS, seed=1, speculation=Speculation(max_draft_tokens=3, **fields))
    bench.send(spec)
    bench.run()
    assert bench.output(spec.request) == continuation(PROMPT, spec.stopping, 1)


def test_searches_that_find_nothing_become_rare(bench, searches):
    generate(bench)
    assert STEPS / INTERVAL - 5 < len(searches) < STEPS / INTERVAL + 50


def test_costs_are_computed_only_for_searches(bench, searches, monkeypatch):
    sizes = []
    of = DraftCost.of
    monkeypatch.setattr(DraftCost, "of", lambda cost, size: (sizes.append(size), of(cost, size))[1])
    generate(bench)
    assert len(searches) <= len(sizes) < len(searches) + 10


def test_searches_that_pay_stay_frequent(bench, searches):
    expected = continuation(PROMPT, spec_of(PROMPT, STEPS).stopping, 1)
    generate(bench, draft_token_ids=tuple(expected))
    assert bench.engine.stats.accepted_draft_tokens > STEPS / 2
    assert len(searches) > 0.9 * (bench.engine.stats.latest.iteration - 10)


def test_the_sequences_of_a_request_read_its_prompt_once(bench, monkeypatch):
    read = []
    extend = Lookup.extend
    monkeypatch.setattr(Lookup, "extend", lambda lookup, tokens: (read.append(len(tokens)), extend(lookup, tokens)))
    bench.send(spec_of(PROMPT, 40, n=4, speculation=DRAFTS))
    bench.run()
    assert [size for size in read if size >= len(PROMPT)] == [len(PROMPT)]
    assert sum(read) > len(PROMPT) + 3 * 30

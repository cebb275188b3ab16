import asyncio
from types import SimpleNamespace

import pytest

from bench.harness import engine_counters
from bench.harness.engine_counters import ACTIVE_REQUESTS, CONTEXT_TOKENS, EngineCounters, parse

PAGE = """# HELP sluice_engine_context_tokens_total Context tokens.
# TYPE sluice_engine_context_tokens_total counter
sluice_engine_context_tokens_total 40.0
sluice_engine_kv_fetched_blocks_total{source="machine"} 3.0
sluice_engine_kv_fetched_blocks_total{source="keeper"} 2.0
"""
FIRST_ENGINE_PORT = 9002


def test_the_values_of_a_page_are_summed_over_labels():
    assert parse(PAGE.splitlines()) == {CONTEXT_TOKENS: 40.0, engine_counters.FETCHED_BLOCKS: 5.0}


@pytest.fixture
def pages(monkeypatch):
    """Pages by port, which a test may change."""
    found = {FIRST_ENGINE_PORT + i: {CONTEXT_TOKENS: 100.0, ACTIVE_REQUESTS: 0.0} for i in (0, 1)}
    monkeypatch.setattr(engine_counters, "_scrape", lambda port: dict(found[port]))
    return found


@pytest.fixture
def ring():
    """Two engines after two routers."""
    roles = {"engine-0": "engine", "engine-1": "engine", "detok-0": "detok", "router-0": "router", "router-1": "router"}
    children = {name: SimpleNamespace(role=role) for name, role in roles.items()}
    plan = SimpleNamespace(metrics_port=9000, routers=2)
    return SimpleNamespace(plan=plan, children=children, pids={name: i for i, name in enumerate(roles)})


@pytest.fixture
def counters(ring):
    return EngineCounters(ring)


def test_a_restarted_engine_counts_from_zero_and_its_dead_process_keeps_its_count(ring, pages, counters):
    asyncio.run(counters.sample())
    assert counters.total(CONTEXT_TOKENS) == 200
    ring.pids["engine-0"] = 77
    pages[FIRST_ENGINE_PORT] = {CONTEXT_TOKENS: 150.0}
    asyncio.run(counters.sample())
    assert counters.total(CONTEXT_TOKENS) == 350


def test_an_engine_that_does_not_answer_keeps_its_count(pages, counters):
    asyncio.run(counters.sample())
    pages[FIRST_ENGINE_PORT] = {}
    assert asyncio.run(counters.sample()).keys() == {"engine-1"}
    assert counters.total(CONTEXT_TOKENS) == 200


def test_a_page_is_ignored_if_the_engine_was_restarted_meanwhile(ring, monkeypatch, counters):
    def scrape(port):
        ring.pids = {**ring.pids, "engine-0": 77}
        return {CONTEXT_TOKENS: 100.0}

    monkeypatch.setattr(engine_counters, "_scrape", scrape)
    assert asyncio.run(counters.sample()).keys() == {"engine-1"}
    assert counters.total(CONTEXT_TOKENS) == 100


def test_the_busy_engine_is_the_one_with_a_request(pages, counters):
    pages[FIRST_ENGINE_PORT + 1][ACTIVE_REQUESTS] = 1.0
    assert asyncio.run(counters.busy()) == "engine-1"

"""A short run of the command for long runs."""

import io

import pytest
from hypothesis import Phase, settings
from rich.console import Console

from engine_worker.kvcache.pool import BlockPool
from tests.engine_worker.core import long_run

pytestmark = pytest.mark.slow


@pytest.fixture
def console(monkeypatch):
    monkeypatch.setattr(long_run, "ROUND", settings(long_run.ROUND, max_examples=3, stateful_step_count=10))
    return Console(file=io.StringIO(), width=300)


def test_a_long_run_executes_the_requested_number_of_rules_and_reports_it(console):
    assert long_run.run(60, 5, console)
    last = console.file.getvalue().splitlines()[-1]
    assert last.startswith("everything held: ")
    rules, engine_steps, *_ = (int(word) for word in last.replace(",", "").split() if word.isdigit())
    assert min(rules, engine_steps) >= 60


def test_a_violation_ends_the_run(console, monkeypatch):
    # Without shrinking, which takes much longer than finding the violation.
    monkeypatch.setattr(long_run, "ROUND", settings(long_run.ROUND, phases=(Phase.generate,)))
    monkeypatch.setattr(BlockPool, "release", lambda pool, block: None)
    assert not long_run.run(100_000, 5, console)
    assert "VIOLATION" in console.file.getvalue().splitlines()[-1]
    assert "CacheCorruptError" in console.file.getvalue()

"""docs/scheduling.md: its example schedulers work, and its settings exist."""

import sys

import pytest

from sluice.settings.describe import settings_of
from sluice.settings.engine import SchedulerNames
from sluice.settings.services import EngineSettings
from tests.fakes.engine import EngineBench
from tests.fakes.scheduling_page import example, settings


@pytest.fixture
def fair(tmp_path, monkeypatch):
    (tmp_path / "fair.py").write_text(example())
    monkeypatch.chdir(tmp_path)
    yield SchedulerNames("fair:FairShare")
    sys.modules.pop("fair", None)


def test_the_fair_share_example(fair):
    bench = EngineBench(schedulers=fair, max_batch_size=2, max_requests=100)
    loud = [bench.submit([1, number], max_tokens=4, salt="loud") for number in range(20)]
    bench.step()
    quiet = [bench.submit([2, number], max_tokens=4, salt="quiet") for number in range(3)]
    bench.run()
    begun = [key[0] for key in bench.receiver.streams]
    assert [request in quiet for request in begun[:8]] == [False, False] + [False, True] * 3
    assert all(bench.output(request) == bench.expected(request) for request in loud + quiet)
    assert bench.cache.preemptions == 0


def test_the_prefill_first_example(tmp_path, monkeypatch):
    (tmp_path / "prefill_first.py").write_text(example("prefill_first"))
    monkeypatch.chdir(tmp_path)
    schedulers = SchedulerNames(micro_batch_scheduler="prefill_first:PrefillFirst")
    bench = EngineBench(schedulers=schedulers, max_batch_size=2, max_tokens_per_step=8, max_requests=100)
    sys.modules.pop("prefill_first")
    early = bench.submit([1, 2], max_tokens=4)
    bench.step()
    bench.step()
    begun = len(bench.output(early))
    late = bench.submit(list(range(24)), max_tokens=4)
    bench.step()
    bench.step()
    assert len(bench.output(early)) <= begun + 1
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in (early, late))


def test_the_example_of_tensorrt_llm(tmp_path, monkeypatch):
    (tmp_path / "to_completion.py").write_text(example("to_completion"))
    monkeypatch.chdir(tmp_path)
    bench = EngineBench(schedulers=SchedulerNames("to_completion:ToCompletion"), num_blocks=12, max_batch_size=8)
    sys.modules.pop("to_completion")
    requests = [bench.submit([number, 1, 2, 3, 4], max_tokens=9) for number in range(6)]
    too_large = bench.submit(range(8), max_tokens=12, n=5)
    most = 0
    while bench.step():
        most = max(most, len(bench.cache.holders))
    assert all(bench.output(request) == bench.expected(request) for request in [*requests, too_large])
    assert bench.cache.preemptions == 0
    assert most > 1


def test_the_example_is_about_thirty_lines():
    assert 25 <= len(example().splitlines()) <= 35


def test_the_settings_on_the_page_exist():
    listed = settings()
    assert {"capacity_scheduler_policy", "scheduler", "priority_aging_seconds"} <= listed
    assert listed <= set(settings_of(EngineSettings))

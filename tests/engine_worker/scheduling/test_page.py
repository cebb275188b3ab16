"""docs/scheduling.md: its example schedulers work, and its settings exist, as does all that a scheduler may use."""

import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import isfunction, signature
from operator import attrgetter

import pytest

from engine_worker.kvcache.forecast import Forecast
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.guaranteed_no_evict import GuaranteedNoEvict
from engine_worker.scheduling.micro_batch import Chunk, InFlightBatching
from engine_worker.scheduling.simple import RequestScheduler, Schedule
from sluice.settings.describe import settings_of
from sluice.settings.engine import SchedulerNames
from sluice.settings.services import EngineSettings
from tests.fakes.engine import EngineBench
from tests.fakes.scheduling_page import code_words, example, settings


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


def as_written(function: Callable) -> str:
    """The call of a function or class as the page writes it."""
    return f"{function.__name__}({', '.join(name for name in signature(function).parameters if name != 'self')})"


def test_the_methods_of_schedulers_and_their_results_are_those_of_the_classes():
    words = code_words("It needs one method.", "You may read, but never write,")
    functions = [GuaranteedNoEvict.schedule_request, InFlightBatching.schedule, RequestScheduler.schedule]
    functions += [RequestScheduler.hold, RequestScheduler.pause, Chunk, Schedule]
    assert {word for word in words if "(" in word.strip("(")} == set(map(as_written, functions))
    assert {each.__module__ for each in (Chunk, Schedule, RequestScheduler)} < words
    assert "static_batch" in words & vars(RequestScheduler).keys()


def test_a_scheduler_is_told_of_the_whole_context_and_forecast():
    context = code_words("with one argument, a `SchedulerContext`:", ". It needs one method")
    assert context == {field.name for field in fields(SchedulerContext)}
    methods = {as_written(each) for name, each in vars(Forecast).items() if isfunction(each) and name[0] != "_"}
    values = {name for name in vars(EngineBench().cache.forecast()) if name[0] != "_"}
    forecast = code_words("- `cache.forecast()`, a simulation", "With overlap, the previous step")
    assert forecast - {"admit", "max_tokens"} == methods | values


def test_all_that_a_scheduler_may_read_exists():
    bench = EngineBench()
    bench.submit([1, 2, 3])
    bench.step()
    (sequence,) = bench.cache.holders
    of_spec = code_words("`request.submit` (", ")")
    of_sequence = (
        code_words("these attributes of a `Sequence`:", "The argument of the constructor has the limits") - of_spec
    )
    assert {
        "request.submit",
        "request.deadline",
        "num_pending",
        "generating",
        "output",
        "order",
        "blocks",
    } < of_sequence
    of_context = code_words("The argument of the constructor has the limits", "- `cache.forecast()`, a simulation")
    assert {"cache.holders", "cache.tokens_per_block"} < of_context
    context = SchedulerContext(bench.cache, max_batch_size=4, max_tokens_per_step=16)
    for words, owner in ((of_spec, sequence.request.submit), (of_sequence, sequence), (of_context, context)):
        for word in words:
            attrgetter(word)(owner)

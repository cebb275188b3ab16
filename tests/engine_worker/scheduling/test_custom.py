"""Custom schedulers in an engine: correct ones are followed, faulty ones do no harm."""

import pytest
from structlog.testing import capture_logs

from engine_worker.scheduling.build import find_classes
from sluice.settings.engine import SchedulerNames
from tests.fakes.engine import EngineBench
from tests.fakes.schedulers import OddFigures

FAKES = "tests.fakes.schedulers"


def bench_with(capacity: str | None = None, micro: str | None = None, whole: str | None = None, **sizes) -> EngineBench:
    policy = f"{FAKES}:{capacity}" if capacity else "max_utilization"
    names = SchedulerNames(policy, micro and f"{FAKES}:{micro}", whole and f"{FAKES}:{whole}")
    return EngineBench(schedulers=names, **sizes)


def serve(bench: EngineBench, count: int = 4, limit: int = 3000, n: int = 1) -> None:
    """Run some requests and check their outputs."""
    requests = [bench.submit(range(i, i + 9), max_tokens=12, seed=i, n=n) for i in range(count)]
    bench.run(limit)
    for request in requests:
        for index in range(n):
            assert bench.output(request, index) == bench.expected(request, index)


def test_a_custom_request_scheduler_decides_everything():
    bench = bench_with(whole="NewestFirst")
    first = bench.submit(range(5), max_tokens=4)
    bench.step()
    second = bench.submit(range(20, 25), max_tokens=4)
    bench.run()
    assert [step.slices[0].tokens[0] for step in bench.runner.steps[:2]] == [0, 20]
    assert all(len(step.slices) == 1 for step in bench.runner.steps)
    assert bench.output(first) == bench.expected(first)
    assert bench.output(second) == bench.expected(second)
    assert bench.cache.preemptions == 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "names",
    [
        {"capacity": "Greedy"},
        {"capacity": "Pausing"},
        {"capacity": "Raising"},
        {"capacity": "Idle"},
        {"capacity": "Mad"},
        {"micro": "Raising"},
        {"micro": "Idle"},
        {"micro": "Mad"},
        {"capacity": "Mad", "micro": "Mad"},
        {"whole": "RaisingWhole"},
        {"whole": "IdleWhole"},
        {"whole": "MadWhole"},
        {"whole": "NewestFirst"},
    ],
    ids=lambda names: "-".join(names.values()),
)
@pytest.mark.parametrize("chunked", [True, False])
def test_a_faulty_scheduler_does_not_change_outputs(names, n, chunked):
    # Capturing the log avoids printing tracebacks, which would take most of the time.
    with capture_logs():
        bench = bench_with(**names, num_blocks=8, max_batch_size=4, max_tokens_per_step=12, chunked_context=chunked)
        serve(bench, n=n)


@pytest.mark.parametrize(
    ("names", "event"),
    [
        ({"capacity": "Greedy"}, "nothing_scheduled"),
        ({"capacity": "Raising"}, "scheduler_raised"),
        ({"micro": "Raising"}, "scheduler_raised"),
        ({"whole": "RaisingWhole"}, "scheduler_raised"),
        ({"micro": "Idle"}, "nothing_scheduled"),
        ({"whole": "IdleWhole"}, "nothing_scheduled"),
        ({"capacity": "Mad"}, "scheduler_answer_corrected"),
        ({"whole": "MadWhole"}, "scheduler_answer_corrected"),
    ],
)
def test_faults_are_logged_but_not_in_every_step(names, event):
    with capture_logs() as logs:
        bench = bench_with(**names, num_blocks=8, max_batch_size=4, max_tokens_per_step=12)
        serve(bench)
    logged = [entry for entry in logs if entry["event"] == event]
    assert 1 <= len(logged) < bench.engine.stats.latest.iteration / 4


@pytest.mark.parametrize("names", [{"capacity": "OwnStatic"}, {"whole": "OwnStaticWhole"}])
def test_the_static_batch_of_a_custom_scheduler_is_reported(names):
    def sizes(bench: EngineBench) -> list[tuple[int, int]]:
        for i, length in enumerate((2, 5, 3)):
            bench.submit([i], max_tokens=length)
        bench.run()
        steps = [report.step for report in bench.reports if report.step]
        return [(step.total_generation_tokens, step.empty_generation_slots) for step in steps]

    known = sizes(EngineBench(max_batch_size=2, schedulers=SchedulerNames("static_batch")))
    assert sizes(bench_with(**names, max_batch_size=2)) == known
    assert max(known) > (0, 0)


@pytest.mark.parametrize("names", [{"capacity": "Newest"}, {"whole": "NewestFirst"}])
def test_a_custom_scheduler_without_a_static_batch(names):
    with capture_logs() as logs:
        bench = bench_with(**names)
        serve(bench)
    assert logs == []
    assert bench.engine.stats.latest.total_generation_tokens == 0


@pytest.mark.parametrize("figures", ["raises", "lacks", None, 3, (1, 2, 3), (-1, 0), (1.5, 0), ("x", "y"), (2**32, 0)])
@pytest.mark.parametrize("names", [{"capacity": "OddFigures"}, {"whole": "OddFiguresWhole"}])
def test_invalid_counts_of_a_static_batch_are_replaced_by_zeros(names, figures, monkeypatch):
    monkeypatch.setattr(OddFigures, "figures", figures)
    with capture_logs() as logs:
        bench = bench_with(**names)
        serve(bench, count=1)
    assert {entry["event"] for entry in logs} <= {"scheduler_raised", "scheduler_answer_corrected"}
    assert logs
    steps = [report.step for report in bench.reports if report.step]
    assert {(step.total_generation_tokens, step.empty_generation_slots) for step in steps} == {(0, 0)}


def test_limits_are_enforced_for_custom_schedulers():
    bench = bench_with(whole="MadWhole", num_blocks=30, max_batch_size=3, max_tokens_per_step=7)
    serve(bench)
    assert all(len(step.slices) <= 3 for step in bench.runner.steps)
    assert all(sum(len(part.tokens) for part in step.slices) <= 7 for step in bench.runner.steps)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            SchedulerNames("nowhere:Class"),
            "capacity_scheduler_policy: 'nowhere:Class' cannot be used: ModuleNotFoundError",
        ),
        (
            SchedulerNames("static"),
            "capacity_scheduler_policy: 'static' cannot be used: it must have the form module:name",
        ),
        (SchedulerNames(f"{FAKES}:Gredy"), "capacity_scheduler_policy: .* AttributeError: .*Gredy"),
        (SchedulerNames(f"{FAKES}:NO_CLASS"), "capacity_scheduler_policy: .*it is not a class"),
        (SchedulerNames(f"{FAKES}:WithoutMethods"), "capacity_scheduler_policy: .* it has no method schedule_request"),
        (
            SchedulerNames(f"{FAKES}:CannotBeMade"),
            "capacity_scheduler_policy: .*constructor failed: TypeError.*more",
        ),
        (
            SchedulerNames(micro_batch_scheduler=f"{FAKES}:WithoutMethods"),
            "micro_batch_scheduler: .* no method schedule",
        ),
        (SchedulerNames(scheduler=f"{FAKES}:Idle"), "scheduler: .* it is not a subclass of RequestScheduler"),
    ],
)
def test_an_unusable_class_is_a_clear_error(names, message):
    with pytest.raises(ValueError, match=message):
        EngineBench(schedulers=names)


def test_a_module_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text("from tests.fakes.schedulers import NewestFirst\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path.parent)
    serve(EngineBench(schedulers=SchedulerNames(scheduler="mine_alone:NewestFirst")))


def test_known_modules_are_not_imported_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "json")
    with pytest.raises(ValueError, match="AttributeError"):
        find_classes(SchedulerNames("json:Nothing"))

"""A step that raises ends only its own sequences, with an error, and the engine continues."""

import pytest

from engine_worker.step import DeviceLostError
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.stats import Stage
from tests.fakes.adapters import ScriptedAdapters, adapter
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("both_overlaps")
step_by_step = pytest.mark.parametrize("both_overlaps", [False], ids=[""], indirect=True)
"""For tests of single steps: without overlap only."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_sequences_of_a_failed_step_end(when):
    bench = EngineBench(max_batch_size=2)
    failing = [bench.submit([1, 2, 3]), bench.submit([4, 5])]
    waiting = bench.submit([6, 7])
    bench.step()
    bench.runner.fail = when
    bench.run()
    assert [bench.fault(request) for request in failing] == ["STEP_FAILED"] * 2
    assert [len(bench.output(request)) for request in failing] == [1, 1]
    assert bench.output(waiting) == bench.expected(waiting)
    later = bench.submit([1, 2, 3])
    bench.run()
    assert bench.output(later) == bench.expected(later)


def test_sequences_that_are_not_in_the_failed_step_continue():
    """With a budget of two tokens the second context is not in the step."""
    bench = EngineBench(max_batch_size=2, max_tokens_per_step=2)
    failing, other = bench.submit(range(8)), bench.submit(range(20, 26))
    bench.runner.fail = "after"
    bench.run()
    assert bench.fault(failing) == "STEP_FAILED"
    assert bench.output(other) == bench.expected(other)


@step_by_step
def test_all_sequences_that_await_the_prompt_end_with_it():
    bench = EngineBench(max_tokens_per_step=8)
    request = bench.submit(range(20), n=5)
    bench.step()
    bench.runner.fail = "after"
    bench.run()
    assert [bench.ended(request, i) for i in range(5)] == [FinishReason.ERROR] * 5
    assert len(bench.runner.steps) == 2


def test_a_failed_step_with_copies():
    bench = EngineBench(max_batch_size=3)
    request = bench.submit(range(6), n=6, seed=2)
    bench.step()
    bench.runner.fail = "before"
    bench.run()
    assert [bench.ended(request, i) for i in range(6)] == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH] * 3
    for sequence in (3, 4, 5):
        assert bench.output(request, sequence) == bench.expected(request, sequence)


@step_by_step
def test_a_runner_that_returns_too_few_results():
    bench = EngineBench()
    run = bench.runner.run
    bench.runner.run = lambda step: run(step)[1:]
    request = bench.submit([1])
    bench.step()
    bench.runner.run = run
    bench.run()
    assert bench.fault(request) == "STEP_FAILED"


@pytest.mark.parametrize("when", ["launch", "before", "after"])
def test_a_lost_device_ends_the_loop_and_no_request(when):
    bench = EngineBench(max_batch_size=2)
    requests = [bench.submit([1, 2, 3]), bench.submit([4, 5]), bench.submit([6])]
    bench.step()
    bench.runner.fail, bench.runner.lost = when, True
    with pytest.raises(DeviceLostError, match="answers no more"):
        bench.run()
    bench.outbox.flush()
    bench.receiver.read()
    streams = [stream for number, stream in bench.receiver.streams.items() if number[0] in requests]
    assert streams
    assert all(stream.end is None for stream in streams)


@pytest.mark.parametrize("together", [True, False])
def test_a_failed_adapter_load_ends_only_the_requests_that_need_it(together):
    """One of the other requests is scheduled before the failure is known."""
    first, second = adapter("a"), adapter("b")
    library = ScriptedAdapters(4, {first.version: 2, second.version: 2})
    bench = EngineBench(max_batch_size=8, max_tokens_per_step=16, adapters=library)
    begun = [bench.submit([1, 2, 3], max_tokens=12), bench.submit([5, 6, 7], max_tokens=12, adapter=second)]
    bench.step()
    bench.runner.fail = "load"
    failing = [bench.submit([*range(20 + i, 30 + i)], adapter=first, n=1 + i) for i in range(2)]
    if not together:
        bench.step()
    begun += [bench.submit([1, 2, 4]), bench.submit([5, 6, 8], adapter=second)]
    bench.run()
    assert {bench.fault(failing[0]), bench.fault(failing[1]), bench.fault(failing[1], 1)} == {"STEP_FAILED"}
    assert [bench.output(request) for request in failing] == [[], []]
    for request in begun:
        assert bench.output(request) == bench.expected(request)
    later = bench.submit([*range(20, 30)], adapter=first)
    bench.run()
    assert bench.output(later) == bench.expected(later)
    assert bench.runner.failures == 1
    assert not +library.users


def test_the_step_after_a_failed_step_that_loads_an_adapter():
    """With overlap the next step is in flight by then: only the requests with the adapter end."""
    first = adapter("a")
    bench = EngineBench(max_batch_size=8, max_tokens_per_step=8, adapters=ScriptedAdapters(2, {first.version: 2}))
    bench.runner.fail = "before"
    failing = bench.submit(range(20, 40), adapter=first)
    bench.step()
    other = bench.submit([1, 2, 3])
    bench.run()
    assert bench.fault(failing) == "STEP_FAILED"
    assert bench.output(other) == bench.expected(other)


def test_end_all():
    bench = EngineBench(max_batch_size=1)
    requests = [bench.submit([i], max_tokens=50, n=2) for i in range(3)]
    bench.step()
    assert bench.engine.end_all(Fault("DRAINING", "bye")) == 3
    bench.step()
    assert [bench.fault(request, i) for request in requests for i in range(2)] == ["DRAINING"] * 6


def test_a_sequence_that_restarts_after_a_failed_step_is_not_preempted():
    """Two requests share a prefix in host memory. The step that loads it for both, with the first request, fails."""
    bench = EngineBench(num_blocks=12, num_host_blocks=32, max_batch_size=4)
    shared = list(range(12))
    bench.submit(shared, max_tokens=1)
    bench.run()
    for start in range(30, 110, 10):
        bench.submit(range(start, start + 9), max_tokens=2)
    bench.run()
    before = bench.cache.preemptions
    bench.runner.fail_moving = True
    failing = bench.submit([*shared, 90], max_tokens=6)
    bench.step()
    starting_again = bench.submit([*shared, 91], max_tokens=6)
    bench.run()
    assert bench.runner.failures == 1
    assert bench.fault(failing) == "STEP_FAILED"
    assert bench.output(starting_again) == bench.expected(starting_again)
    assert bench.cache.preemptions == before == 0
    reported = [stats for report in bench.reports for stats in report.requests if stats.request == starting_again]
    assert {stats.pauses for stats in reported} == {0}
    assert Stage.PAUSED not in {stats.stage for stats in reported}
    assert all(report.step.paused_requests == 0 for report in bench.reports if report.step)


@pytest.mark.parametrize("steps", [(1, 3), (2, 4), (3, 5), (4, 6), (8, 10)])
def test_two_failed_steps_with_copies(steps):
    """A sequence whose copy was not made ends, and no other sequence copies from it."""
    bench = EngineBench(num_blocks=9, max_batch_size=2)
    request = bench.submit(range(6), max_tokens=6, n=9)
    for step in range(max(steps) + 1):
        bench.runner.fail = "before" if step in steps else None
        bench.step()
    bench.runner.fail = None
    bench.run()
    whole = [i for i in range(9) if bench.ended(request, i) is FinishReason.LENGTH]
    assert len(whole) >= 5
    for sequence in whole:
        assert bench.output(request, sequence) == bench.expected(request, sequence)

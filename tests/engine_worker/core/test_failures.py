"""A step that raises: its sequences end with an error, nobody else, and the engine goes on."""

import pytest

from engine_worker.step import DeviceLostError
from sluice.ring.errors import Fault, FinishReason
from sluice.ring.stats import Stage
from tests.fakes.adapters import ScriptedAdapters, adapter
from tests.fakes.engine import EngineBench

pytestmark = pytest.mark.usefixtures("either_way")
step_by_step = pytest.mark.parametrize("either_way", [False], ids=[""], indirect=True)
"""For a test that says what each single step does."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_sequences_of_the_step_end(when):
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


def test_whoever_is_not_in_the_step_goes_on():
    """Under a budget of two tokens the second context is not in the step; later resumed ones are not either."""
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


def test_a_step_with_copies_that_fails():
    bench = EngineBench(max_batch_size=3)
    request = bench.submit(range(6), n=6, seed=2)
    bench.step()
    bench.runner.fail = "before"
    bench.run()
    assert [bench.ended(request, i) for i in range(6)] == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH] * 3
    for sequence in (3, 4, 5):
        assert bench.output(request, sequence) == bench.expected(request, sequence)


@step_by_step
def test_a_runner_that_draws_too_few():
    bench = EngineBench()
    run = bench.runner.run
    bench.runner.run = lambda step: run(step)[1:]
    request = bench.submit([1])
    bench.step()
    bench.runner.run = run
    bench.run()
    assert bench.fault(request) == "STEP_FAILED"


@pytest.mark.parametrize("when", ["launch", "before", "after"])
def test_a_step_that_takes_the_device_with_it_ends_the_loop_and_no_request(when):
    bench = EngineBench(max_batch_size=2)
    requests = [bench.submit([1, 2, 3]), bench.submit([4, 5]), bench.submit([6])]
    bench.step()
    bench.runner.fail, bench.runner.lost = when, True
    with pytest.raises(DeviceLostError, match="answers no more"):
        bench.run()
    bench.outbox.flush()
    bench.receiver.read()
    streams = [found for number, found in bench.receiver.streams.items() if number[0] in requests]
    assert streams
    assert all(found.end is None for found in streams)


@pytest.mark.parametrize("together", [True, False])
def test_an_adapter_that_cannot_be_loaded_ends_the_requests_that_need_it_and_no_others(together):
    """One of these joins before the failure is known."""
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


def test_the_step_behind_one_that_was_to_load_an_adapter_and_failed():
    """With overlap the one behind is on its way by then: it ends with the adapter's requests alone."""
    first = adapter("a")
    bench = EngineBench(max_batch_size=8, max_tokens_per_step=8, adapters=ScriptedAdapters(2, {first.version: 2}))
    bench.runner.fail = "before"
    failing = bench.submit(range(20, 40), adapter=first)
    bench.step()
    other = bench.submit([1, 2, 3])
    bench.run()
    assert bench.fault(failing) == "STEP_FAILED"
    assert bench.output(other) == bench.expected(other)


def test_ending_everything():
    bench = EngineBench(max_batch_size=1)
    requests = [bench.submit([i], max_tokens=50, n=2) for i in range(3)]
    bench.step()
    assert bench.engine.end_all(Fault("DRAINING", "bye")) == 3
    bench.step()
    assert [bench.fault(request, i) for request in requests for i in range(2)] == ["DRAINING"] * 6


def test_whoever_starts_again_because_a_step_failed_has_not_paused():
    """Two share a prefix that the host has: the first one's step was to load it for both, and fails."""
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
    reported = [found for report in bench.reports for found in report.requests if found.request == starting_again]
    assert {found.pauses for found in reported} == {0}
    assert Stage.PAUSED not in {found.stage for found in reported}
    assert all(report.step.paused_requests == 0 for report in bench.reports if report.step)


@pytest.mark.parametrize("steps", [(1, 3), (2, 4), (3, 5), (4, 6), (8, 10)])
def test_two_steps_with_copies_that_fail(steps):
    """Nobody copies from a sequence that ended because its own copy was never made."""
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

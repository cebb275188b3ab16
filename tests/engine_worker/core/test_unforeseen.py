"""Ends and failures that a step in flight did not foresee: what was promised, counted and reserved for it."""

from typing import ClassVar

import pytest

from engine_worker.core.stats import Stage, stage_of
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import RequestScheduler, Schedule
from sluice.settings.engine import SchedulerNames
from tests.fakes.engine import EngineBench

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@pytest.mark.parametrize("n", [2, 3])
@OVERLAP
def test_a_promise_of_a_failed_step_is_taken_back(overlap, n):
    """Whoever was to compute the prompt is cancelled while it does, and then that step fails."""
    bench = EngineBench(overlap=overlap)
    request = bench.submit([1, 2, 3], max_tokens=4, n=n)
    bench.runner.fail = "after" if overlap else None
    bench.step()
    bench.cancel(request, 0)
    bench.run()
    for index in range(1, n):
        assert bench.output(request, index) == bench.expected(request, index)
    again = bench.submit([1, 2, 3], max_tokens=4)
    bench.run()
    assert bench.output(again) == bench.expected(again)


def test_steps_are_reported_in_order_and_take_their_time():
    bench = EngineBench(overlap=True)
    results = bench.engine._results

    def slow_results(flight):
        bench.clock.now += 0.1
        return results(flight)

    bench.engine._results = slow_results
    bench.submit([1, 2], max_tokens=9)
    bench.step()
    bench.runner.fail = "after"
    bench.submit([5, 6, 7], max_tokens=9)
    bench.run()
    steps = [report.step for report in bench.reports if report.step]
    assert [step.iteration for step in steps] == list(range(1, len(steps) + 1))
    assert all(step.step_seconds > 0.09 for step in steps)
    assert [step.time for step in steps] == sorted(step.time for step in steps)


@OVERLAP
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_the_next_begins_as_soon_as_the_blocks_are_back(policy, overlap):
    probe = EngineBench()
    probed = probe.submit(range(40, 64), max_tokens=8, seed=3)
    probe.run()
    eos = probe.output(probed)[4]
    bench = EngineBench(17, 4, overlap=overlap, schedulers=SchedulerNames(policy))
    bench.submit(range(4), max_tokens=24)
    ending = bench.submit(range(40, 64), max_tokens=8, seed=3, eos_token_ids=(eos,))
    waiting = bench.submit(range(70, 94), max_tokens=8)
    while ending in bench.engine.live.requests or bench.inbox:
        bench.step()
    for _ in range(2):
        bench.step()
    assert bench.engine.live.requests[waiting].scheduled_at is not None


@OVERLAP
def test_a_last_token_needs_no_block(overlap):
    bench = EngineBench(4, 4, overlap=overlap)
    bench.submit(range(50, 58), max_tokens=1)
    bench.run()
    bench.submit(range(5), max_tokens=4)
    bench.run()
    assert bench.cache.tiers.evictions == 0


@OVERLAP
def test_late_results_are_not_counted(overlap):
    probe = EngineBench()
    probed = probe.submit([5, 6], max_tokens=6)
    probe.run()
    bench = EngineBench(overlap=overlap)
    request = bench.submit([5, 6], max_tokens=6, eos_token_ids=(probe.output(probed)[2],))
    bench.run()
    assert len(bench.output(request)) == 3 == bench.engine.stats.generated_tokens


@OVERLAP
def test_the_heir_of_a_prompt_begins_its_request(overlap):
    bench = EngineBench(overlap=overlap)
    request = bench.submit([1, 2, 3], max_tokens=6, n=2)
    bench.cancel(request, 0)
    for _ in range(3):
        bench.step()
    assert stage_of(bench.engine.live.requests[request]) is not Stage.QUEUED
    assert bench.cache.prompt_tokens == 3


class Scripted(RequestScheduler):
    """What runs is what the test says; else everybody."""

    plans: ClassVar = []

    def schedule(self, active, inflight_request_ids=frozenset()):
        named = {sequence.request.spec.request: sequence for sequence in active}
        if self.plans:
            return self.plans.pop(0)(self, named)
        held = self.hold(active)
        chunks = [Chunk(sequence, sequence.num_ready) for sequence in held if not sequence.generating]
        return Schedule(chunks[:4], [sequence for sequence in held if sequence.generating])


def test_moves_that_were_decided_and_not_launched_fail_with_what_they_move(monkeypatch):
    """A user's scheduler takes blocks, and only then wants to pause somebody in flight, whose step fails."""
    monkeypatch.setattr(Scripted, "plans", [])
    bench = EngineBench(
        8, 4, 4, num_host_blocks=16, overlap=True, schedulers=SchedulerNames(scheduler=f"{__name__}:Scripted")
    )
    bench.submit(range(13), max_tokens=1)
    bench.run()
    bench.submit(range(30, 61), max_tokens=1)
    bench.run()
    running = bench.submit([90, 91], max_tokens=9)
    bench.step()
    bench.step()
    loading = bench.submit(range(13), max_tokens=4)

    def loads_without_running(scheduler, named):
        assert named[loading] in scheduler.hold(list(named.values()))
        return Schedule([], [named[running]])

    Scripted.plans.append(loads_without_running)
    bench.runner.fail_moving = True
    bench.step()
    bench.cancel(loading)
    evicting = bench.submit(range(62, 86), max_tokens=2)
    decided = []

    def holds_then_pauses(scheduler, named):
        scheduler.hold([named[evicting]])
        decided.extend(scheduler.context.cache.tiers.moves)
        scheduler.pause([named[running]])

    Scripted.plans.append(holds_then_pauses)
    bench.run()
    assert decided
    assert bench.output(evicting) == bench.expected(evicting)

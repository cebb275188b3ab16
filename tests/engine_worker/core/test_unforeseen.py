"""Ends and failures while a step is in flight: its promised tokens, counts and reserved blocks."""

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
def test_a_promise_of_a_failed_step_is_dropped(overlap, n):
    """The sequence that computes the prompt is cancelled, and then its step fails."""
    bench = EngineBench(overlap=overlap)
    request = bench.submit([1, 2, 3], max_tokens=4, n=n)
    bench.runner.fail = "after" if overlap else None
    bench.step()
    bench.cancel(request, 0)
    bench.run()
    for index in range(1, n):
        assert bench.output(request, index) == bench.expected(request, index)
    next_request = bench.submit([1, 2, 3], max_tokens=4)
    bench.run()
    assert bench.output(next_request) == bench.expected(next_request)


def test_steps_are_reported_in_order_with_their_durations():
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
def test_the_next_request_begins_as_soon_as_blocks_are_released(policy, overlap):
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
def test_the_successor_that_computes_the_prompt_begins_the_request(overlap):
    bench = EngineBench(overlap=overlap)
    request = bench.submit([1, 2, 3], max_tokens=6, n=2)
    bench.cancel(request, 0)
    for _ in range(3):
        bench.step()
    assert stage_of(bench.engine.live.requests[request]) is not Stage.QUEUED
    assert bench.cache.prompt_tokens == 3


class Scripted(RequestScheduler):
    """Schedules by `plans`; without plans, all sequences run."""

    plans: ClassVar = []

    def schedule(self, active, inflight_request_ids=frozenset()):
        named = {sequence.request.submit.request: sequence for sequence in active}
        if self.plans:
            return self.plans.pop(0)(self, named)
        holders = self.hold(active)
        chunks = [Chunk(sequence, sequence.num_ready) for sequence in holders if not sequence.generating]
        return Schedule(chunks[:4], [sequence for sequence in holders if sequence.generating])


def test_pending_moves_are_undone_with_a_failed_step(monkeypatch):
    """A custom scheduler allocates blocks and then preempts a sequence whose step is in flight and fails."""
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
        decided.extend(scheduler.context.cache.tiers.pending)
        scheduler.pause([named[running]])

    Scripted.plans.append(holds_then_pauses)
    bench.run()
    assert decided
    assert bench.output(evicting) == bench.expected(evicting)

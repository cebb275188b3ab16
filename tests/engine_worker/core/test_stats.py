"""The engine's reports: of each step and each request, and none while it is idle."""

import json

import msgspec
import pytest

from engine_worker.core.stats import REFRESH_SECONDS, REFRESHED_PER_STEP
from engine_worker.ringside import metrics
from sluice.settings.engine import SchedulerNames
from sluice.v1 import admin_pb2 as pb
from sluice.wire.errors import FinishReason
from sluice.wire.stats import RequestProgress, Stage, StatsSource, StepStats, request_json, step_json
from tests.fakes.engine import EngineBench


def steps(bench) -> list[StepStats]:
    return [report.step for report in bench.reports if report.step is not None]


def reported(bench, request: int) -> list[RequestProgress]:
    return [stats for report in bench.reports for stats in report.requests if stats.request == request]


def last(bench, request: int) -> RequestProgress:
    return reported(bench, request)[-1]


def test_snapshots_never_change_and_an_idle_engine_creates_none():
    bench = EngineBench()
    bench.submit([1], max_tokens=2)
    bench.step()
    first = bench.engine.stats.latest
    bench.run()
    assert (first.iteration, first.active_requests) == (1, 1)
    bench.clock.now += 5
    bench.step()
    idle = bench.engine.stats.latest
    assert (idle.iteration, idle.active_requests, idle.tokens_per_second) == (2, 0, 0.0)
    bench.step()
    assert bench.engine.stats.latest is idle


@pytest.mark.parametrize("policy", ["max_utilization", "static_batch"])
def test_the_snapshot_of_an_idle_engine_shows_nothing_scheduled(policy):
    bench = EngineBench(schedulers=SchedulerNames(policy))
    bench.submit(range(9), max_tokens=3)
    bench.submit([7], max_tokens=3)
    bench.run()
    last_step, idle = steps(bench)[-1], bench.engine.stats.latest
    assert last_step.scheduled_requests > 0
    assert (idle.iteration, idle.scheduled_requests, idle.context_requests) == (last_step.iteration, 0, 0)
    assert (idle.generation_requests, idle.total_context_tokens) == (0, 0)
    assert (idle.total_generation_tokens, idle.empty_generation_slots) == (0, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_two_micro_batches_alternate(overlap):
    bench = EngineBench(overlap=overlap)
    bench.submit(range(9), max_tokens=6)
    bench.run()
    assert [step.micro_batch_id for step in steps(bench)] == ([0, 1, 0, 1, 0, 1] if overlap else [0] * 6)


def test_metrics_show_the_latest_step():
    bench = EngineBench(max_tokens_per_step=16, schedulers=SchedulerNames("static_batch"))
    bench.submit([1], max_tokens=3)
    bench.submit(range(20), max_tokens=3)
    bench.step()
    bench.step()
    read = {
        (sample.name.removeprefix("sluice_engine_"), *sample.labels.values()): sample.value
        for metric in metrics.steps(bench.engine)
        for sample in metric.samples
    }
    assert read["sequences_scheduled", "context"] == read["sequences_scheduled", "generation"] == 1
    assert (read["static_batch_tokens",], read["static_batch_empty_slots",]) == (3, 0)
    assert read["tokens_per_second",] == bench.engine.stats.latest.tokens_per_second > 0


def test_every_step_is_reported_once_and_an_idle_engine_is_silent():
    bench = EngineBench(max_batch_size=4, max_tokens_per_step=16)
    requests = [bench.submit(range(i, i + 9 + i), max_tokens=5 + i) for i in range(1, 4)]
    bench.run()
    reported_steps = steps(bench)
    assert [step.iteration for step in reported_steps] == list(range(1, len(reported_steps) + 1))
    prompts = [len(bench.specs[request, 0].prompt) for request in requests]
    cached = sum(last(bench, request).cached_tokens for request in requests)
    assert sum(step.total_context_tokens for step in reported_steps) == sum(prompts) - cached
    tokens = [len(bench.output(request)) for request in requests]
    # The first token of each request is sampled in a context step.
    assert sum(step.generation_requests for step in reported_steps) == sum(tokens) - len(requests)
    for step in reported_steps:
        assert step.scheduled_requests == step.context_requests + step.generation_requests > 0
        assert step.max_kv_blocks == step.free_kv_blocks + step.used_kv_blocks == 64
        assert (step.max_requests, step.tokens_per_kv_block, step.micro_batch_id) == (64, 4, 0)
    assert reported_steps[0].active_requests == 3
    assert reported_steps[-1].active_requests == reported_steps[-1].used_kv_blocks == 0
    reports = len(bench.reports)
    for _ in range(5):
        bench.step()
    assert len(bench.reports) == reports


def test_times_are_unix_times_by_the_engines_clock(monkeypatch):
    bench = EngineBench()
    run = bench.runner.run

    def run_long(step):
        bench.clock.now += 0.25
        return run(step)

    monkeypatch.setattr(bench.runner, "run", run_long)
    bench.submit(range(8), max_tokens=3)
    bench.run()
    first, second, third = steps(bench)
    assert first.step_seconds == second.step_seconds == pytest.approx(0.25)
    assert second.time - first.time == pytest.approx(0.26)
    (request,) = {stats.request for stats in bench.reports[-1].requests}
    ended = last(bench, request)
    assert ended.first_scheduled == ended.arrival == pytest.approx(first.time - 0.25)
    assert ended.first_token == pytest.approx(first.time)
    assert ended.last_token == pytest.approx(third.time)
    assert ended.arrival > 1_700_000_000


def test_a_request_is_reported_from_its_arrival_to_its_end():
    bench = EngineBench(max_batch_size=1, max_tokens_per_step=4)
    first, second = bench.submit(range(8), max_tokens=3), bench.submit(range(20, 28), max_tokens=3)
    bench.step()
    assert [last(bench, request).stage for request in (first, second)] == [Stage.CONTEXT, Stage.QUEUED]
    assert last(bench, second).first_scheduled is None
    bench.run()
    for request in (first, second):
        stages = [stats.stage for stats in reported(bench, request)]
        assert stages == sorted(stages)
        assert stages.count(Stage.ENDED) == 1
        ended = last(bench, request)
        assert (ended.prompt_tokens, ended.cached_tokens, ended.generated_tokens) == (8, 0, 3)
        assert ended.name == f"request-{request}"
        assert ended.blocks_allocated == 3


def test_a_request_that_is_cancelled_in_the_queue_is_reported_without_a_step():
    bench = EngineBench(max_batch_size=1)
    running, waiting = bench.submit([1], max_tokens=3), bench.submit([2], max_tokens=3)
    bench.step()
    bench.cancel(waiting)
    bench.cancel(running)
    before = len(steps(bench))
    bench.step()
    assert len(steps(bench)) == before
    ended = last(bench, waiting)
    assert (ended.stage, ended.first_scheduled, ended.first_token) == (Stage.ENDED, None, None)
    assert last(bench, running).stage is Stage.ENDED


def test_all_sequences_of_a_request_count():
    bench = EngineBench()
    request = bench.submit(range(9), max_tokens=4, n=3)
    bench.run()
    assert last(bench, request).generated_tokens == 12
    assert sum(step.generation_requests for step in steps(bench)) == 9


def test_running_requests_are_refreshed_a_few_per_step():
    bench = EngineBench(num_blocks=256, max_batch_size=10, max_tokens_per_step=64)
    requests = [bench.submit([i], max_tokens=30) for i in range(10)]
    for _ in range(3):
        bench.step()
    bench.clock.now += REFRESH_SECONDS
    before = len(bench.reports)
    for _ in range(3):
        bench.step()
    sizes = [len(report.requests) for report in bench.reports[before:]]
    assert sizes == [REFRESHED_PER_STEP, REFRESHED_PER_STEP, 10 - 2 * REFRESHED_PER_STEP]
    assert {last(bench, request).stage for request in requests} == {Stage.GENERATION}
    assert min(last(bench, request).generated_tokens for request in requests) >= 3


def test_preemptions_are_counted_per_request_and_per_engine():
    bench = EngineBench(num_blocks=8, max_batch_size=4)
    requests = [bench.submit(range(10 * i, 10 * i + 6), max_tokens=20) for i in range(3)]
    most_paused = 0
    while bench.step() or bench.engine.live.requests:
        paused = sum(sequence.state.value == "preempted" for sequence in bench.engine.live.active)
        assert bench.engine.stats.latest.paused_requests == paused
        most_paused = max(most_paused, paused)
    assert most_paused > 0
    pauses = [last(bench, request).pauses for request in requests]
    assert sum(pauses) == bench.cache.preemptions > 0
    assert pauses[0] == 0


def test_a_static_batch_reports_its_tokens_and_its_empty_slots():
    schedulers = SchedulerNames(capacity_scheduler_policy="static_batch")
    bench = EngineBench(max_batch_size=2, schedulers=schedulers)
    lengths = [2, 5, 3]
    for i, length in enumerate(lengths):
        bench.submit([i], max_tokens=length)
    bench.run()
    slots = [(step.total_generation_tokens, step.empty_generation_slots) for step in steps(bench)]
    # Two requests together until the longer one has ended, then the third alone.
    assert slots == [(2, 0), (4, 0), (5, 1), (6, 1), (7, 1), (1, 0), (2, 0), (3, 0)]


def test_totals_add_up():
    bench = EngineBench()
    for _ in range(2):
        bench.submit(range(12), max_tokens=4)
        bench.run()
    stats, cache, live = bench.engine.stats, bench.cache, bench.engine.live
    assert (live.num_begun, cache.prompt_tokens, stats.generated_tokens) == (2, 24, 8)
    assert cache.cached_tokens == 8
    assert stats.context_tokens == cache.prompt_tokens - cache.cached_tokens
    assert live.ended == {FinishReason.LENGTH.name: 2}
    assert sum(bench.engine.stats.step_seconds.counts) == len(steps(bench))
    assert bench.engine.stats.step_sequences.total == len(steps(bench))


def test_json_has_every_field_of_the_public_messages():
    source = StatsSource("e", "m", "v1", 8)
    step = json.loads(step_json(StepStats(iteration=3, time=1.5, step_seconds=0.25), source, draining=True))
    assert step.keys() == {"type", *(field.name for field in pb.EngineStats.DESCRIPTOR.fields)}
    assert (step["type"], step["engine_id"], step["iteration"], step["time"]) == ("step", "e", 3, 1.5)
    assert (step["step_time"], step["draining"]) == (0.25, True)
    assert (step["model_fingerprint"], step["model_version"], step["max_batch_size"]) == ("m", "v1", 8)
    values = {field.name: 1 for field in msgspec.structs.fields(RequestProgress)}
    stats = RequestProgress(**values | {"name": "r", "stage": Stage.PAUSED, "arrival": 2.0, "first_scheduled": None})
    message = json.loads(request_json(stats, "e", now=5.0))
    assert message.keys() == {"type", *(field.name for field in pb.RequestStats.DESCRIPTOR.fields)}
    assert (message["type"], message["stage"], message["first_scheduled"]) == ("request", "paused", None)
    assert (message["engine_id"], message["request_id"], message["queued"]) == ("e", "r", 3.0)
    scheduled = msgspec.structs.replace(stats, first_scheduled=2.5)
    assert json.loads(request_json(scheduled, "e", now=5.0))["queued"] == 0.5

"""Statistics of steps and requests, under TensorRT-LLM's names."""

import json

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.client import Forbidden, NotImplementedByServer, Unauthenticated
from sluice.executor import GenerationExecutor, RequestStage
from sluice.executor.report_logs import StepsLog
from sluice.executor.stats import STAGES
from sluice.v1 import admin_pb2 as pb
from tests.fakes.failures import Failure


def step(number: int, **counters) -> pb.EngineStats:
    return pb.EngineStats(engine_id="engine-0", iteration=number, **counters)


def test_steps(address, script) -> None:
    full = step(
        7,
        active_requests=1,
        max_requests=2,
        queued_requests=3,
        scheduled_requests=4,
        context_requests=5,
        generation_requests=6,
        paused_requests=7,
        total_context_tokens=8,
        micro_batch_id=9,
        total_generation_tokens=10,
        empty_generation_slots=11,
        max_kv_blocks=12,
        free_kv_blocks=13,
        used_kv_blocks=14,
        tokens_per_kv_block=15,
        prefix_cache_hit_ratio=0.5,
        tokens_per_second=18.5,
        max_host_blocks=16,
        used_host_blocks=17,
        drafting_requests=2,
        draft_tokens=8,
        accepted_draft_tokens=5,
        time=Timestamp(seconds=100, nanos=500_000_000),
        step_time=Duration(nanos=2_000_000),
    )
    script.steps = [pb.StreamStepsResponse(steps=[full])]
    with GenerationExecutor.connect(address) as executor:
        (stats,) = executor.get_latest_iteration_stats(timeout=60)
        assert executor.get_latest_iteration_stats() == []
    assert json.loads(stats.to_json_str()) == {
        "engine_id": "engine-0",
        "iter": 7,
        "timestamp": 100.5,
        "iter_latency_ms": 2.0,
        "num_active_requests": 1,
        "max_num_active_requests": 2,
        "num_queued_requests": 3,
        "tokens_per_second": 18.5,
        "kv_cache_stats": {
            "max_num_blocks": 12,
            "free_num_blocks": 13,
            "used_num_blocks": 14,
            "tokens_per_block": 15,
            "cache_hit_rate": 0.5,
            "max_num_host_blocks": 16,
            "used_num_host_blocks": 17,
        },
        "inflight_batching_stats": {
            "num_scheduled_requests": 4,
            "num_context_requests": 5,
            "num_gen_requests": 6,
            "num_paused_requests": 7,
            "num_ctx_tokens": 8,
            "micro_batch_id": 9,
        },
        "static_batching_stats": {
            "num_scheduled_requests": 4,
            "num_context_requests": 5,
            "num_ctx_tokens": 8,
            "num_gen_tokens": 10,
            "empty_gen_slots": 11,
        },
        "spec_dec_stats": {
            "num_draft_tokens": 8,
            "num_accepted_tokens": 5,
            "num_requests_with_draft_tokens": 2,
            "acceptance_length": 3.5,
        },
    }


def test_requests(address, script) -> None:
    with GenerationExecutor.connect(address, iter_stats_max_iterations=0) as executor:
        executor.generate("x")
        wire_id = script.seen[-1].spec.request_id
    other_stats = pb.RequestStats(
        engine_id="engine-0",
        request_id="other",
        stage=pb.REQUEST_STAGE_ENDED,
        arrival=Timestamp(seconds=1),
        first_scheduled=Timestamp(seconds=2),
        last_token=Timestamp(seconds=3),
        queued=Duration(seconds=1),
        prompt_tokens=4,
        cached_tokens=5,
        generated_tokens=6,
        pauses=7,
        blocks_allocated=8,
        blocks_reused=9,
        blocks_missed=10,
        draft_tokens=11,
        accepted_draft_tokens=12,
        first_iteration=13,
        iteration=14,
    )
    own_stats = pb.RequestStats(request_id=wire_id, stage=99)
    outdated = pb.RequestStats(request_id=wire_id, stage=pb.REQUEST_STAGE_QUEUED)
    script.steps = [pb.StreamStepsResponse(requests=[outdated, other_stats, own_stats])]
    with GenerationExecutor.connect(address) as executor:
        executor._session._prefix = wire_id.rpartition("-")[0]
        first, second = executor.get_latest_request_stats(timeout=60)
    assert json.loads(first.to_json_str()) == {
        "id": None,
        "wire_id": "other",
        "engine_id": "engine-0",
        "stage": "generation_complete",
        "arrival": 1.0,
        "first_scheduled": 2.0,
        "first_token": None,
        "last_token": 3.0,
        "queued_seconds": 1.0,
        "num_prompt_tokens": 4,
        "num_cached_tokens": 5,
        "num_generated_tokens": 6,
        "num_pauses": 7,
        "alloc_total_blocks_per_request": 17,
        "alloc_new_blocks_per_request": 8,
        "reused_blocks_per_request": 9,
        "missed_blocks_per_request": 10,
        "num_draft_tokens": 11,
        "num_accepted_draft_tokens": 12,
        "first_iter": 13,
        "iter": 14,
    }
    assert (second.id, second.stage) == (1, RequestStage.UNKNOWN)


def test_every_stage_has_a_name() -> None:
    assert set(STAGES) == set(pb.RequestStage.values()) - {pb.REQUEST_STAGE_UNSPECIFIED}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, NotImplementedByServer),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, Forbidden),
    ],
)
def test_a_server_without_statistics(address, script, code, kind) -> None:
    script.no_stats = Failure(code, "not here: StreamSteps")
    with GenerationExecutor.connect(address) as executor:
        for read in (executor.get_latest_iteration_stats, executor.get_latest_request_stats):
            with pytest.raises(kind, match="StreamSteps"):
                read(timeout=60)


def test_a_broken_stream_is_reopened(address, script) -> None:
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE, "draining")
    with GenerationExecutor.connect(address) as executor:
        script.steps, script.failure = [pb.StreamStepsResponse(steps=[step(1)])], None
        assert [stats.iter for stats in executor.get_latest_iteration_stats(timeout=60)] == [1]


def test_only_the_newest_statistics_are_kept() -> None:
    log = StepsLog(3)
    requests = [pb.RequestStats(request_id=str(i)) for i in (0, 1, 2, 3, 1)]
    log.put(pb.StreamStepsResponse(steps=[step(i) for i in range(5)], requests=requests))
    assert [entry.iteration for entry in log.take_steps(0)] == [2, 3, 4]
    assert [entry.request_id for entry in log.take_requests(0)] == ["2", "3", "1"]
    assert log.take_steps(0) == log.take_requests(0) == []

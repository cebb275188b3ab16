"""Statistics: their JSON form, and their translation from the executor's statistics."""

import json

import sluice.trtllm as trtllm
from sluice import executor
from sluice.executor.stats import read_request as executor_request
from sluice.executor.stats import read_step as executor_step
from sluice.trtllm.statistics import read_request, read_step
from sluice.v1 import admin_pb2 as pb


def test_names_in_json() -> None:
    stats = trtllm.IterationStats(iter=3, iter_latency_ms=1.5, kv_cache_stats=trtllm.KvCacheStats(4))
    decoded = json.loads(stats.to_json_str())
    assert (decoded["iter"], decoded["iterLatencyMS"], decoded["kvCacheStats"]["maxNumBlocks"]) == (3, 1.5, 4)
    assert decoded["inflightBatchingStats"] is None
    assert {"newActiveRequestsQueueLatencyMS", "numCompletedRequests", "gpuMemUsage", "specDecodingStats"} <= set(
        decoded
    )


def test_requests_in_json() -> None:
    request = trtllm.RequestStats(1, trtllm.RequestStage.CONTEXT_IN_PROGRESS)
    request.dis_serving_stats = trtllm.DisServingRequestStats(2.0)
    decoded = json.loads(trtllm.RequestStatsPerIteration(5, [request]).to_json_str())
    assert (decoded["iter"], decoded["requestStats"][0]["stage"]) == (5, "CONTEXT_IN_PROGRESS")
    assert decoded["requestStats"][0]["disServingStats"] == {"kvCacheTransferMS": 2.0, "kvCacheSize": 0}
    assert json.loads(request.to_json_str()) == decoded["requestStats"][0]


STEP = pb.EngineStats(
    iteration=8, active_requests=3, queued_requests=2, max_requests=64, max_kv_blocks=10, free_kv_blocks=4,
    scheduled_requests=3, context_requests=1, generation_requests=2, total_context_tokens=7,
    draft_tokens=4, accepted_draft_tokens=2, drafting_requests=1,
)  # fmt: skip


def test_a_step() -> None:
    stats = read_step(executor_step(STEP), is_static=False)
    assert (stats.iter, stats.num_active_requests, stats.num_queued_requests) == (7, 3, 2)
    assert stats.kv_cache_stats.free_num_blocks == 4
    assert stats.inflight_batching_stats.num_gen_requests == 2
    assert stats.inflight_batching_stats.avg_num_decoded_tokens_per_iter == 2.0
    assert stats.specdec_stats.num_accepted_tokens == 2
    assert stats.static_batching_stats is None
    assert stats.gpu_mem_usage is None
    static = read_step(executor_step(STEP), is_static=True)
    assert static.static_batching_stats.num_ctx_tokens == 7
    assert static.inflight_batching_stats is None


def test_only_what_engines_do_not_report_is_none() -> None:
    steps = [read_step(executor_step(STEP), is_static) for is_static in (False, True)]
    groups = [value for step in steps for value in vars(step).values() if hasattr(value, "__dataclass_fields__")]
    ended = request(pb.REQUEST_STAGE_ENDED)
    unknown = {name for group in (*steps, *groups, ended) for name, value in vars(group).items() if value is None}
    assert unknown == {
        "new_active_requests_queue_latency_ms", "num_new_active_requests", "num_completed_requests", "gpu_mem_usage",
        "cpu_mem_usage", "pinned_mem_usage", "cross_kv_cache_stats", "alloc_total_blocks", "alloc_new_blocks",
        "reused_blocks", "missed_blocks", "draft_overhead", "iter_latency_ms", "dis_serving_stats",
        # One of the two, depending on the policy.
        "static_batching_stats", "inflight_batching_stats",
    }  # fmt: skip
    assert all(step.iter_latency_ms is not None for step in steps)


def request(stage: int, **counts: int) -> trtllm.RequestStats:
    return read_request(executor_request(pb.RequestStats(stage=stage, prompt_tokens=9, **counts), 5), 5)


def test_stages_of_a_request() -> None:
    queued, context = request(pb.REQUEST_STAGE_QUEUED), request(pb.REQUEST_STAGE_CONTEXT)
    assert (queued.stage, queued.context_prefill_position, queued.scheduled) == (trtllm.RequestStage.QUEUED, 0, False)
    assert (context.context_prefill_position, context.scheduled) == (None, True)
    paused = request(pb.REQUEST_STAGE_PAUSED, generated_tokens=4)
    assert paused.stage is trtllm.RequestStage.GENERATION_IN_PROGRESS
    assert (paused.paused, paused.scheduled, paused.context_prefill_position) == (True, False, 9)


def test_counts_of_a_request() -> None:
    stats = request(
        pb.REQUEST_STAGE_ENDED,
        generated_tokens=6,
        accepted_draft_tokens=4,
        blocks_allocated=2,
        blocks_reused=3,
        blocks_missed=1,
    )
    assert (stats.id, stats.num_generated_tokens, stats.avg_num_decoded_tokens_per_iter) == (5, 6, 3.0)
    assert (stats.alloc_total_blocks_per_request, stats.alloc_new_blocks_per_request) == (5, 2)
    assert stats.kv_cache_hit_rate_per_request == 0.75


def test_every_stage_of_the_executor_is_known() -> None:
    assert {stage for stage in executor.RequestStage if stage.value not in ("paused", "unknown")} == set(
        trtllm.statistics.STAGES
    )

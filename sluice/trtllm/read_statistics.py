"""Translates the executor's statistics to TensorRT-LLM's."""

from datetime import datetime

from sluice import executor
from sluice.trtllm.enums import RequestStage
from sluice.trtllm.statistics import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    SpecDecodingStats,
    StaticBatchingStats,
)

TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"
STAGES = {
    executor.RequestStage.QUEUED: RequestStage.QUEUED,
    executor.RequestStage.CONTEXT_IN_PROGRESS: RequestStage.CONTEXT_IN_PROGRESS,
    executor.RequestStage.GENERATION_IN_PROGRESS: RequestStage.GENERATION_IN_PROGRESS,
    executor.RequestStage.GENERATION_COMPLETE: RequestStage.GENERATION_COMPLETE,
}
IN_STEPS = (RequestStage.CONTEXT_IN_PROGRESS, RequestStage.GENERATION_IN_PROGRESS)


def step_number(iteration: int) -> int:
    """TensorRT-LLM's number of a step: it counts an engine's steps from 0."""
    return max(0, iteration - 1)


def read_step(step: executor.IterationStats, is_static: bool) -> IterationStats:
    """`is_static`: whether the engine uses static batching."""
    return IterationStats(
        timestamp=datetime.fromtimestamp(step.timestamp).strftime(TIMESTAMP),
        iter=step_number(step.iter),
        iter_latency_ms=step.iter_latency_ms,
        new_active_requests_queue_latency_ms=None,
        num_new_active_requests=None,
        num_active_requests=step.num_active_requests,
        num_queued_requests=step.num_queued_requests,
        num_completed_requests=None,
        max_num_active_requests=step.max_num_active_requests,
        gpu_mem_usage=None,
        cpu_mem_usage=None,
        pinned_mem_usage=None,
        kv_cache_stats=_kv_cache(step.kv_cache_stats),
        static_batching_stats=_static(step.static_batching_stats) if is_static else None,
        inflight_batching_stats=None if is_static else _inflight(step),
        specdec_stats=_speculation(step) if step.spec_dec_stats.num_requests_with_draft_tokens else None,
    )


def _kv_cache(stats: executor.KvCacheStats) -> KvCacheStats:
    return KvCacheStats(
        max_num_blocks=stats.max_num_blocks,
        free_num_blocks=stats.free_num_blocks,
        used_num_blocks=stats.used_num_blocks,
        tokens_per_block=stats.tokens_per_block,
        alloc_total_blocks=None,
        alloc_new_blocks=None,
        reused_blocks=None,
        missed_blocks=None,
        cache_hit_rate=stats.cache_hit_rate,
    )


def _static(stats: executor.StaticBatchingStats) -> StaticBatchingStats:
    return StaticBatchingStats(
        num_scheduled_requests=stats.num_scheduled_requests,
        num_context_requests=stats.num_context_requests,
        num_ctx_tokens=stats.num_ctx_tokens,
        num_gen_tokens=stats.num_gen_tokens,
        empty_gen_slots=stats.empty_gen_slots,
    )


def _inflight(step: executor.IterationStats) -> InflightBatchingStats:
    stats = step.inflight_batching_stats
    generating = stats.num_gen_requests
    decoded = generating + step.spec_dec_stats.num_accepted_tokens
    return InflightBatchingStats(
        num_scheduled_requests=stats.num_scheduled_requests,
        num_context_requests=stats.num_context_requests,
        num_gen_requests=generating,
        num_paused_requests=stats.num_paused_requests,
        num_ctx_tokens=stats.num_ctx_tokens,
        micro_batch_id=stats.micro_batch_id,
        avg_num_decoded_tokens_per_iter=decoded / generating if generating else 0.0,
    )


def _speculation(step: executor.IterationStats) -> SpecDecodingStats:
    stats = step.spec_dec_stats
    return SpecDecodingStats(
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_requests_with_draft_tokens=stats.num_requests_with_draft_tokens,
        acceptance_length=stats.acceptance_length,
        iter_latency_ms=None,
        draft_overhead=None,
    )


def read_request(stats: executor.RequestStats, request_id: int) -> RequestStats:
    paused = stats.stage is executor.RequestStage.PAUSED
    stage = STAGES.get(stats.stage, RequestStage.GENERATION_IN_PROGRESS if paused else RequestStage.QUEUED)
    blocks, reused = stats.alloc_total_blocks_per_request, stats.reused_blocks_per_request
    looked_up = reused + stats.missed_blocks_per_request
    return RequestStats(
        id=request_id,
        stage=stage,
        context_prefill_position=_prefilled(stage, stats.num_prompt_tokens),
        num_generated_tokens=stats.num_generated_tokens,
        avg_num_decoded_tokens_per_iter=tokens_per_step(stats),
        scheduled=stage in IN_STEPS and not paused,
        paused=paused,
        alloc_total_blocks_per_request=blocks,
        alloc_new_blocks_per_request=stats.alloc_new_blocks_per_request,
        reused_blocks_per_request=reused,
        missed_blocks_per_request=stats.missed_blocks_per_request,
        kv_cache_hit_rate_per_request=reused / looked_up if looked_up else 0.0,
    )


def tokens_per_step(stats: executor.RequestStats) -> float:
    # Each step of a request yields one token, and the draft tokens that were accepted.
    steps = stats.num_generated_tokens - stats.num_accepted_draft_tokens
    return stats.num_generated_tokens / steps if steps else 0.0


def _prefilled(stage: RequestStage, num_prompt_tokens: int) -> int | None:
    if stage is RequestStage.QUEUED:
        return 0
    return None if stage is RequestStage.CONTEXT_IN_PROGRESS else num_prompt_tokens

"""Statistics of engine steps and requests, under TensorRT-LLM's names."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sluice.client.results import seconds
from sluice.v1 import admin_pb2 as pb


@dataclass(frozen=True, slots=True)
class KvCacheStats:
    """Usage of an engine's KV cache, in blocks."""

    max_num_blocks: int
    free_num_blocks: int
    """Free blocks, including those whose contents are cached for reuse."""
    used_num_blocks: int
    tokens_per_block: int
    cache_hit_rate: float
    """Fraction of prompt tokens found in the prefix cache since the engine started, in [0, 1]."""
    max_num_host_blocks: int
    used_num_host_blocks: int


@dataclass(frozen=True, slots=True)
class InflightBatchingStats:
    """The composition of a step. Each of the `n` outputs of a request, and each beam, counts as a request."""

    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    """Preempted requests, which will continue."""
    num_ctx_tokens: int
    """Tokens computed as context: of prompts, and tokens computed again after a preemption or a resume."""
    micro_batch_id: int


@dataclass(frozen=True, slots=True)
class StaticBatchingStats:
    """The composition of a step under the policy "static_batch"; all zero under other policies."""

    num_scheduled_requests: int
    num_context_requests: int
    num_ctx_tokens: int
    num_gen_tokens: int
    """Tokens generated since the batch started."""
    empty_gen_slots: int
    """Slots of the batch that were empty in the step, because their sequences had ended before it."""


@dataclass(frozen=True, slots=True)
class SpecDecStats:
    """Speculative decoding in a step."""

    num_draft_tokens: int
    num_accepted_tokens: int
    num_requests_with_draft_tokens: int
    acceptance_length: float
    """Mean number of tokens generated per sequence with draft tokens; 0.0 if no sequence had any."""


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One step of one engine."""

    engine_id: str
    iter: int
    """Number of the step."""
    timestamp: float
    """End of the step, in seconds since 1970."""
    iter_latency_ms: float
    """Duration of the step, in milliseconds."""
    num_active_requests: int
    max_num_active_requests: int
    num_queued_requests: int
    tokens_per_second: float
    """Rate of generated tokens over the last second."""
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    static_batching_stats: StaticBatchingStats
    spec_dec_stats: SpecDecStats

    def to_json_str(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(asdict(self))


class RequestStage(StrEnum):
    """What an engine does with a request."""

    QUEUED = "queued"
    CONTEXT_IN_PROGRESS = "context_in_progress"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    PAUSED = "paused"
    """Preempted: other requests use its KV cache memory; it will continue."""
    GENERATION_COMPLETE = "generation_complete"
    UNKNOWN = "unknown"


STAGES = {
    pb.REQUEST_STAGE_QUEUED: RequestStage.QUEUED,
    pb.REQUEST_STAGE_CONTEXT: RequestStage.CONTEXT_IN_PROGRESS,
    pb.REQUEST_STAGE_GENERATION: RequestStage.GENERATION_IN_PROGRESS,
    pb.REQUEST_STAGE_PAUSED: RequestStage.PAUSED,
    pb.REQUEST_STAGE_ENDED: RequestStage.GENERATION_COMPLETE,
}


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request in an engine, summed over its outputs. Times are in seconds since 1970, and None before the event."""

    id: int | None
    """The executor's `request_id`; None for a request of another client."""
    wire_id: str
    """The request's id at the server, as in the server's log."""
    engine_id: str
    stage: RequestStage
    arrival: float | None
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    queued_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_generated_tokens: int
    num_pauses: int
    """Times that the request was preempted."""
    alloc_total_blocks_per_request: int
    alloc_new_blocks_per_request: int
    reused_blocks_per_request: int
    missed_blocks_per_request: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    first_iter: int | None
    """Number of the request's first step; None before it."""
    iter: int
    """Number of the engine's newest step when this was reported; for an ended request, of the request's last step."""

    def to_json_str(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(asdict(self))


def read_step(stats: pb.EngineStats) -> IterationStats:
    return IterationStats(
        engine_id=stats.engine_id,
        iter=stats.iteration,
        timestamp=seconds(stats.time),
        iter_latency_ms=1000 * seconds(stats.step_time),
        num_active_requests=stats.active_requests,
        max_num_active_requests=stats.max_requests,
        num_queued_requests=stats.queued_requests,
        tokens_per_second=stats.tokens_per_second,
        kv_cache_stats=_read_kv_cache(stats),
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=stats.scheduled_requests,
            num_context_requests=stats.context_requests,
            num_gen_requests=stats.generation_requests,
            num_paused_requests=stats.paused_requests,
            num_ctx_tokens=stats.total_context_tokens,
            micro_batch_id=stats.micro_batch_id,
        ),
        static_batching_stats=StaticBatchingStats(
            num_scheduled_requests=stats.scheduled_requests,
            num_context_requests=stats.context_requests,
            num_ctx_tokens=stats.total_context_tokens,
            num_gen_tokens=stats.total_generation_tokens,
            empty_gen_slots=stats.empty_generation_slots,
        ),
        spec_dec_stats=SpecDecStats(
            num_draft_tokens=stats.draft_tokens,
            num_accepted_tokens=stats.accepted_draft_tokens,
            num_requests_with_draft_tokens=stats.drafting_requests,
            acceptance_length=_acceptance_length(stats),
        ),
    )


def _read_kv_cache(stats: pb.EngineStats) -> KvCacheStats:
    return KvCacheStats(
        max_num_blocks=stats.max_kv_blocks,
        free_num_blocks=stats.free_kv_blocks,
        used_num_blocks=stats.used_kv_blocks,
        tokens_per_block=stats.tokens_per_kv_block,
        cache_hit_rate=stats.prefix_cache_hit_ratio,
        max_num_host_blocks=stats.max_host_blocks,
        used_num_host_blocks=stats.used_host_blocks,
    )


def _acceptance_length(stats: pb.EngineStats) -> float:
    drafting = stats.drafting_requests
    return (drafting + stats.accepted_draft_tokens) / drafting if drafting else 0.0


def read_request(stats: pb.RequestStats, request_id: int | None) -> RequestStats:
    return RequestStats(
        id=request_id,
        wire_id=stats.request_id,
        engine_id=stats.engine_id,
        stage=STAGES.get(stats.stage, RequestStage.UNKNOWN),
        arrival=_time(stats, "arrival"),
        first_scheduled=_time(stats, "first_scheduled"),
        first_token=_time(stats, "first_token"),
        last_token=_time(stats, "last_token"),
        queued_seconds=seconds(stats.queued),
        num_prompt_tokens=stats.prompt_tokens,
        num_cached_tokens=stats.cached_tokens,
        num_generated_tokens=stats.generated_tokens,
        num_pauses=stats.pauses,
        alloc_total_blocks_per_request=stats.blocks_allocated + stats.blocks_reused,
        alloc_new_blocks_per_request=stats.blocks_allocated,
        reused_blocks_per_request=stats.blocks_reused,
        missed_blocks_per_request=stats.blocks_missed,
        num_draft_tokens=stats.draft_tokens,
        num_accepted_draft_tokens=stats.accepted_draft_tokens,
        first_iter=stats.first_iteration or None,
        iter=stats.iteration,
    )


def _time(stats: Any, field: str) -> float | None:
    return seconds(getattr(stats, field)) if stats.HasField(field) else None

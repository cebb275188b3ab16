"""Statistics of steps and requests. Fields that engines do not report are None."""

import json
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from sluice.trtllm.enums import RequestStage


class InJson:
    """Base of statistics with a JSON form."""

    def to_json_str(self) -> str:
        return json.dumps(_as_json(self))


@dataclass
class KvCacheStats:
    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int | None = 0
    alloc_new_blocks: int | None = 0
    reused_blocks: int | None = 0
    missed_blocks: int | None = 0
    cache_hit_rate: float = 0.0


@dataclass
class StaticBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_ctx_tokens: int = 0
    num_gen_tokens: int = 0
    empty_gen_slots: int = 0


@dataclass
class InflightBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass
class SpecDecodingStats:
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0
    iter_latency_ms: float | None = 0.0
    draft_overhead: float | None = 0.0


@dataclass
class IterationStats(InJson):
    """One step of one engine."""

    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float | None = 0.0
    num_new_active_requests: int | None = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int | None = 0
    max_num_active_requests: int = 0
    gpu_mem_usage: int | None = 0
    cpu_mem_usage: int | None = 0
    pinned_mem_usage: int | None = 0
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: KvCacheStats | None = None
    static_batching_stats: StaticBatchingStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None
    specdec_stats: SpecDecodingStats | None = None


@dataclass
class DebugTensorsPerIteration:
    iter: int = 0
    debug_tensors: dict[str, Any] = field(default_factory=dict)


@dataclass
class DisServingRequestStats:
    kv_cache_transfer_ms: float = 0.0
    kv_cache_size: int = 0


@dataclass
class RequestStats(InJson):
    id: int = 0
    stage: RequestStage = RequestStage.QUEUED
    context_prefill_position: int | None = 0
    """Number of prompt tokens that have been computed; None, unknown, while the prompt is being computed."""
    num_generated_tokens: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    scheduled: bool = False
    paused: bool = False
    dis_serving_stats: DisServingRequestStats | None = None
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0
    kv_cache_hit_rate_per_request: float = 0.0


@dataclass
class RequestStatsPerIteration(InJson):
    """The latest statistics of requests."""

    iter: int = 0
    """Number of the newest step that was known when these statistics were read."""
    request_stats: list[RequestStats] = field(default_factory=list)


JSON_NAMES = {"specdec_stats": "specDecodingStats"}


def _as_json(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {_json_name(field.name): _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _json_name(name: str) -> str:
    """A field's name in TensorRT-LLM's JSON: iter_latency_ms becomes iterLatencyMS."""
    first, *others = JSON_NAMES.get(name, name).split("_")
    return first + "".join("MS" if part == "ms" else part.capitalize() for part in others)

"""What engines report about steps and requests, under TensorRT-LLM's names. Fields that are not reported are None."""

import json
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypeVar

from sluice import executor
from sluice.executor.stats import ReportedRequest, ReportedStep
from sluice.trtllm.enums import RequestStage

T = TypeVar("T")

TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"
STAGES = {stage: RequestStage[stage.name] for stage in executor.RequestStage if stage.name in RequestStage.__members__}
IN_STEPS = (RequestStage.CONTEXT_IN_PROGRESS, RequestStage.GENERATION_IN_PROGRESS)
JSON_NAMES = {"specdec_stats": "specDecodingStats"}
ZERO = timedelta(0)


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


def step_number(iteration: int) -> int:
    """TensorRT-LLM's number of a step: it counts an engine's steps from 0."""
    return max(0, iteration - 1)


def read_step(step: ReportedStep, is_static: bool) -> IterationStats:
    """`is_static`: whether the engine uses static batching."""
    batch, drafts = step.inflight_batching_stats, step.spec_dec_stats
    per_step = _ratio(batch.num_gen_requests + drafts.num_accepted_tokens, batch.num_gen_requests)
    inflight = _translate(InflightBatchingStats, batch, avg_num_decoded_tokens_per_iter=per_step)
    return _translate(
        IterationStats,
        step,
        timestamp=datetime.fromtimestamp(step.timestamp).strftime(TIMESTAMP),
        iter=step_number(step.iter),
        kv_cache_stats=_translate(KvCacheStats, step.kv_cache_stats),
        static_batching_stats=_translate(StaticBatchingStats, step.static_batching_stats) if is_static else None,
        inflight_batching_stats=None if is_static else inflight,
        specdec_stats=_translate(SpecDecodingStats, drafts) if drafts.num_requests_with_draft_tokens else None,
    )


def read_request(stats: ReportedRequest, request_id: int) -> RequestStats:
    paused = stats.stage is executor.RequestStage.PAUSED
    stage = STAGES.get(stats.stage, RequestStage.GENERATION_IN_PROGRESS if paused else RequestStage.QUEUED)
    reused = stats.reused_blocks_per_request
    return _translate(
        RequestStats,
        stats,
        id=request_id,
        stage=stage,
        context_prefill_position=_prefilled(stage, stats.num_prompt_tokens),
        avg_num_decoded_tokens_per_iter=tokens_per_step(stats),
        scheduled=stage in IN_STEPS and not paused,
        paused=paused,
        kv_cache_hit_rate_per_request=_ratio(reused, reused + stats.missed_blocks_per_request),
    )


def _translate(kind: type[T], stats: object, **given: Any) -> T:
    """Fields that are not `given` are those of `stats` with the same names; None where engines do not report them."""
    return kind(**{name: getattr(stats, name, None) for name in kind.__annotations__} | given)


def tokens_per_step(stats: ReportedRequest) -> float:
    # Each step of a request yields one token, and the draft tokens that were accepted.
    return _ratio(stats.num_generated_tokens, stats.num_generated_tokens - stats.num_accepted_draft_tokens)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _prefilled(stage: RequestStage, num_prompt_tokens: int) -> int | None:
    if stage is RequestStage.QUEUED:
        return 0
    return None if stage is RequestStage.CONTEXT_IN_PROGRESS else num_prompt_tokens


@dataclass
class TimingMetrics:
    """Times of the request's events, since 1970; zero for events that have not happened."""

    arrival_time: timedelta = ZERO
    first_scheduled_time: timedelta = ZERO
    first_token_time: timedelta = ZERO
    last_token_time: timedelta = ZERO
    kv_cache_transfer_start: timedelta = ZERO
    kv_cache_transfer_end: timedelta = ZERO
    kv_cache_size: int = 0


@dataclass
class KvCacheMetrics:
    """KV cache blocks of the request's prompt."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class RequestPerfMetrics:
    """Requested with `OutputConfig.return_perf_metrics`."""

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    """Number of the request's first step."""
    last_iter: int | None = None
    """Number of the request's last step; None before the end."""
    iter: int | None = None
    """Number of the step of the latest token."""


def read_metrics(
    stats: ReportedRequest, arrival: float, tokens_per_block: int, num_tokens: int | None, *, is_final: bool
) -> RequestPerfMetrics:
    """The metrics for one response.

    `arrival`: when the request was enqueued, in seconds since 1970. `num_tokens`: tokens up to and including the
    response; None if the request has several outputs.
    """
    metrics = RequestPerfMetrics(_timing(stats, arrival), _kv_cache(stats, tokens_per_block), _speculation(stats))
    if stats.first_iter is not None:
        metrics.first_iter = step_number(stats.first_iter)
        if is_final:
            metrics.iter = metrics.last_iter = step_number(stats.iter)
        elif num_tokens is not None:
            # Assumes one token per step since the engine's latest report.
            number = step_number(stats.iter) + num_tokens - stats.num_generated_tokens
            metrics.iter = max(metrics.first_iter, number)
    if not is_final:
        metrics.timing_metrics.last_token_time = ZERO
    return metrics


def _timing(stats: ReportedRequest, arrival: float) -> TimingMetrics:
    scheduled = stats.first_scheduled
    return TimingMetrics(
        # At most the time of scheduling: the clock may have been set between the two readings.
        arrival_time=_time(arrival if scheduled is None else min(arrival, scheduled)),
        first_scheduled_time=_time(scheduled),
        first_token_time=_time(stats.first_token),
        last_token_time=_time(stats.last_token),
    )


def _time(seconds: float | None) -> timedelta:
    return ZERO if seconds is None else timedelta(seconds=seconds)


def _kv_cache(stats: ReportedRequest, tokens_per_block: int) -> KvCacheMetrics:
    """Metrics of the prompt's blocks, including a last block that is only partly filled."""
    blocks, reused = (-(-tokens // tokens_per_block) for tokens in (stats.num_prompt_tokens, stats.num_cached_tokens))
    missed = blocks - reused
    return KvCacheMetrics(
        num_total_allocated_blocks=missed,
        num_new_allocated_blocks=missed,
        num_reused_blocks=reused,
        num_missed_blocks=missed,
        kv_cache_hit_rate=reused / blocks if blocks else 0.0,
    )


def _speculation(stats: ReportedRequest) -> SpeculativeDecodingMetrics:
    drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
    return SpeculativeDecodingMetrics(accepted / drafted if drafted else 0.0, accepted, drafted)

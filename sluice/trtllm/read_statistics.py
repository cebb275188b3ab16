"""Translates the executor's statistics to TensorRT-LLM's."""

from datetime import datetime
from typing import Any, TypeVar

from sluice import executor
from sluice.executor.stats import ReportedRequest, ReportedStep
from sluice.trtllm.enums import RequestStage
from sluice.trtllm.statistics import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    SpecDecodingStats,
    StaticBatchingStats,
)

T = TypeVar("T")
TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"
STAGES = {stage: RequestStage[stage.name] for stage in executor.RequestStage if stage.name in RequestStage.__members__}
IN_STEPS = (RequestStage.CONTEXT_IN_PROGRESS, RequestStage.GENERATION_IN_PROGRESS)


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

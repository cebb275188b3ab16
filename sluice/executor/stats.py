"""Statistics of engine steps and requests, which `sluice.executor` exports under TensorRT-LLM's names.

`Annotated` says which field of the server's message a field is read from, or the function that computes it from the
message. Other fields have the names of the message's fields.
"""

import json
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from typing import Annotated, Any, TypeVar

from sluice.client.results import seconds
from sluice.v1 import admin_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReportedCache:
    """Usage of an engine's KV cache, in blocks."""

    max_num_blocks: Annotated[int, "max_kv_blocks"]
    free_num_blocks: Annotated[int, "free_kv_blocks"]
    """Free blocks, including those whose contents are cached for reuse."""
    used_num_blocks: Annotated[int, "used_kv_blocks"]
    tokens_per_block: Annotated[int, "tokens_per_kv_block"]
    cache_hit_rate: Annotated[float, "prefix_cache_hit_ratio"]
    """Fraction of prompt tokens found in the prefix cache since the engine started, in [0, 1]."""
    max_num_host_blocks: Annotated[int, "max_host_blocks"]
    used_num_host_blocks: Annotated[int, "used_host_blocks"]


@dataclass(frozen=True, slots=True)
class ReportedBatch:
    """The composition of a step. Each of the `n` outputs of a request, and each beam, counts as a request."""

    num_scheduled_requests: Annotated[int, "scheduled_requests"]
    num_context_requests: Annotated[int, "context_requests"]
    num_gen_requests: Annotated[int, "generation_requests"]
    num_paused_requests: Annotated[int, "paused_requests"]
    """Preempted requests, which will continue."""
    num_ctx_tokens: Annotated[int, "total_context_tokens"]
    """Tokens computed as context: of prompts, and tokens computed again after a preemption or a resume."""
    micro_batch_id: int


@dataclass(frozen=True, slots=True)
class ReportedStaticBatch:
    """The composition of a step under the policy "static_batch"; all zero under other policies."""

    num_scheduled_requests: Annotated[int, "scheduled_requests"]
    num_context_requests: Annotated[int, "context_requests"]
    num_ctx_tokens: Annotated[int, "total_context_tokens"]
    num_gen_tokens: Annotated[int, "total_generation_tokens"]
    """Tokens generated since the batch started."""
    empty_gen_slots: Annotated[int, "empty_generation_slots"]
    """Slots of the batch that were empty in the step, because their sequences had ended before it."""


def _acceptance_length(stats: pb.EngineStats) -> float:
    drafting = stats.drafting_requests
    return (drafting + stats.accepted_draft_tokens) / drafting if drafting else 0.0


@dataclass(frozen=True, slots=True)
class ReportedDrafts:
    """Speculative decoding in a step."""

    num_draft_tokens: Annotated[int, "draft_tokens"]
    num_accepted_tokens: Annotated[int, "accepted_draft_tokens"]
    num_requests_with_draft_tokens: Annotated[int, "drafting_requests"]
    acceptance_length: Annotated[float, _acceptance_length]
    """Mean number of tokens generated per sequence with draft tokens; 0.0 if no sequence had any."""


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """One step of one engine."""

    engine_id: str
    iter: Annotated[int, "iteration"]
    """Number of the step."""
    timestamp: Annotated[float, lambda stats: seconds(stats.time)]
    """End of the step, in seconds since 1970."""
    iter_latency_ms: Annotated[float, lambda stats: 1000 * seconds(stats.step_time)]
    """Duration of the step, in milliseconds."""
    num_active_requests: Annotated[int, "active_requests"]
    max_num_active_requests: Annotated[int, "max_requests"]
    num_queued_requests: Annotated[int, "queued_requests"]
    tokens_per_second: float
    """Rate of generated tokens over the last second."""
    kv_cache_stats: ReportedCache
    inflight_batching_stats: ReportedBatch
    static_batching_stats: ReportedStaticBatch
    spec_dec_stats: ReportedDrafts

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


def _moment(name: str) -> Callable[[Any], float | None]:
    return lambda stats: seconds(getattr(stats, name)) if stats.HasField(name) else None


@dataclass(frozen=True, slots=True)
class ReportedRequest:
    """One request in an engine, summed over its outputs. Times are in seconds since 1970, and None before the event."""

    id: int | None
    """The executor's `request_id`; None for a request of another client."""
    wire_id: Annotated[str, "request_id"]
    """The request's id at the server, as in the server's log."""
    engine_id: str
    stage: Annotated[RequestStage, lambda stats: STAGES.get(stats.stage, RequestStage.UNKNOWN)]
    arrival: Annotated[float | None, _moment("arrival")]
    first_scheduled: Annotated[float | None, _moment("first_scheduled")]
    first_token: Annotated[float | None, _moment("first_token")]
    last_token: Annotated[float | None, _moment("last_token")]
    queued_seconds: Annotated[float, lambda stats: seconds(stats.queued)]
    num_prompt_tokens: Annotated[int, "prompt_tokens"]
    num_cached_tokens: Annotated[int, "cached_tokens"]
    """Prompt tokens found in the prefix cache."""
    num_generated_tokens: Annotated[int, "generated_tokens"]
    num_pauses: Annotated[int, "pauses"]
    """Times that the request was preempted."""
    alloc_total_blocks_per_request: Annotated[int, lambda stats: stats.blocks_allocated + stats.blocks_reused]
    alloc_new_blocks_per_request: Annotated[int, "blocks_allocated"]
    reused_blocks_per_request: Annotated[int, "blocks_reused"]
    missed_blocks_per_request: Annotated[int, "blocks_missed"]
    num_draft_tokens: Annotated[int, "draft_tokens"]
    num_accepted_draft_tokens: Annotated[int, "accepted_draft_tokens"]
    first_iter: Annotated[int | None, lambda stats: stats.first_iteration or None]
    """Number of the request's first step; None before it."""
    iter: Annotated[int, "iteration"]
    """Number of the engine's newest step when this was reported; for an ended request, of the request's last step."""

    def to_json_str(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(asdict(self))


def read_step(stats: pb.EngineStats) -> ReportedStep:
    return _read(ReportedStep, stats)


def read_request(stats: pb.RequestStats, request_id: int | None) -> ReportedRequest:
    return _read(ReportedRequest, stats, id=request_id)


def _read(kind: Callable[..., T], stats: Any, **given: Any) -> T:
    """Read the fields of `kind` that are not `given`. Fields that are groups are read from the same message."""
    return kind(**given, **{name: source(stats) for name, source in _sources(kind).items() if name not in given})


@cache
def _sources(kind: Any) -> dict[str, Callable[[Any], Any]]:
    return {field.name: _source(field) for field in fields(kind)}


def _source(field: Field[Any]) -> Callable[[Any], Any]:
    if isinstance(field.type, type) and is_dataclass(field.type):
        return partial(_read, field.type)
    (source,) = getattr(field.type, "__metadata__", (field.name,))
    return source if callable(source) else attrgetter(source)

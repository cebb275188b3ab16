"""An engine's statistics of steps and requests. The engine and the wire use the same structs.

Times are seconds of the Unix epoch, so that they are valid on other machines. Differences between them are measured
with the engine's monotonic clock.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from sluice.wire.message import Count, Finite, Moment, Name, Number, Total


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """The state of the engine at one step. sluice.v1.EngineStats describes the fields."""

    iteration: Total = 0
    active_requests: Count = 0
    max_requests: Count = 0
    queued_requests: Count = 0
    scheduled_requests: Count = 0
    context_requests: Count = 0
    generation_requests: Count = 0
    paused_requests: Count = 0
    total_context_tokens: Count = 0
    micro_batch_id: Count = 0
    total_generation_tokens: Count = 0
    empty_generation_slots: Count = 0
    max_kv_blocks: Count = 0
    free_kv_blocks: Count = 0
    used_kv_blocks: Count = 0
    tokens_per_kv_block: Count = 0
    prefix_cache_hit_ratio: Finite = 0.0
    tokens_per_second: Finite = 0.0
    time: Moment = 0.0
    """Time at which the step ended."""
    step_seconds: Finite = 0.0
    max_host_blocks: Count = 0
    used_host_blocks: Count = 0
    drafting_requests: Count = 0
    draft_tokens: Count = 0
    accepted_draft_tokens: Count = 0


class Stage(IntEnum):
    """The stage of a request. The numbers are those of sluice.v1.RequestStage."""

    QUEUED = 1
    CONTEXT = 2
    GENERATION = 3
    PAUSED = 4
    ENDED = 5


class RequestProgress(msgspec.Struct, frozen=True, array_like=True):
    """A request in the engine, with totals over its sequences. sluice.v1.RequestStats describes the fields."""

    request: Number
    name: Name
    """The caller's request id."""
    stage: Stage
    arrival: Moment
    first_scheduled: Moment | None
    first_token: Moment | None
    last_token: Moment | None
    prompt_tokens: Count
    cached_tokens: Count
    generated_tokens: Count
    pauses: Count
    blocks_allocated: Count
    """Number of newly allocated blocks."""
    blocks_reused: Count
    """Number of blocks that were prefix cache hits."""
    blocks_missed: Count
    """Number of full prompt blocks that were not in the prefix cache."""
    draft_tokens: Count = 0
    accepted_draft_tokens: Count = 0
    first_iteration: Total = 0
    """The request's first step. 0: none yet."""
    iteration: Total = 0
    """The engine's latest step."""

    def queued(self, now: float) -> float:
        """Seconds from arrival until the request was first scheduled, or until `now`."""
        return max(0.0, (now if self.first_scheduled is None else self.first_scheduled) - self.arrival)


class StatsSource(NamedTuple):
    """The engine that the statistics describe."""

    engine_id: str
    model_fingerprint: str
    model_version: str
    max_batch_size: int


def step_fields(stats: StepStats, source: StatsSource, draining: bool) -> dict[str, Any]:
    """The fields of sluice.v1.EngineStats. Times are in seconds."""
    fields = msgspec.structs.asdict(stats)
    return source._asdict() | {"draining": draining, "step_time": fields.pop("step_seconds")} | fields


def request_fields(stats: RequestProgress, engine: str, now: float) -> dict[str, Any]:
    """The fields of sluice.v1.RequestStats. Times are in seconds; `now` is of the Unix epoch."""
    fields = msgspec.structs.asdict(stats)
    # The ring's number of the request; clients know the request by its id.
    del fields["request"]
    return {"engine_id": engine, "request_id": fields.pop("name"), "queued": stats.queued(now)} | fields


def step_json(stats: StepStats, source: StatsSource, draining: bool) -> str:
    """A JSON object with "type": "step" and `step_fields`."""
    return _json({"type": "step"} | step_fields(stats, source, draining))


def request_json(stats: RequestProgress, engine: str, now: float) -> str:
    """A JSON object with "type": "request" and `request_fields`. The stage is a name in lower case."""
    return _json({"type": "request"} | request_fields(stats, engine, now) | {"stage": stats.stage.name.lower()})


def _json(fields: dict[str, Any]) -> str:
    return msgspec.json.encode(fields).decode()

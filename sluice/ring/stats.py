"""An engine's statistics of steps and requests, the same structs in the engine and on the wire.

Times are seconds of the Unix epoch, so that they mean something on other machines; differences come from the engine's
monotonic clock.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from sluice.ring.message import Count, Finite, Moment, Name, Number, Total


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine at one step. Fields as in sluice.v1.EngineStats, which explains them."""

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
    """When the step ended."""
    step_seconds: Finite = 0.0
    max_host_blocks: Count = 0
    used_host_blocks: Count = 0
    drafting_requests: Count = 0
    draft_tokens: Count = 0
    accepted_draft_tokens: Count = 0


class Stage(IntEnum):
    """Numbers as in sluice.v1.RequestStage."""

    QUEUED = 1
    CONTEXT = 2
    GENERATION = 3
    PAUSED = 4
    ENDED = 5


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """One request in the engine, over all its sequences. Fields as in sluice.v1.RequestStats."""

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
    """Blocks newly allocated for it."""
    blocks_reused: Count
    """Blocks found in the prefix cache instead."""
    blocks_missed: Count
    """Full prompt blocks that were not found there."""
    draft_tokens: Count = 0
    accepted_draft_tokens: Count = 0
    first_iteration: Total = 0
    """0: no step yet."""
    iteration: Total = 0
    """The engine's newest step."""

    def queued(self, now: float) -> float:
        """Seconds from arrival until first scheduled, or until `now`."""
        return max(0.0, (now if self.first_scheduled is None else self.first_scheduled) - self.arrival)


class StatsSource(NamedTuple):
    """Whose statistics they are."""

    engine_id: str
    model_fingerprint: str
    model_version: str


def step_json(stats: StepStats, source: StatsSource, draining: bool) -> str:
    """One JSON object: "type" is "step", then the fields of sluice.v1.EngineStats by name; times in seconds."""
    fields = msgspec.structs.asdict(stats)
    own = {"step_time": fields.pop("step_seconds"), "draining": draining}
    return _json({"type": "step"} | source._asdict() | fields | own)


def request_json(stats: RequestStats, engine: str, now: float) -> str:
    """The same for sluice.v1.RequestStats: "type" is "request", the stage is a word. `now`: seconds of the epoch."""
    fields = msgspec.structs.asdict(stats)
    del fields["request"]
    names = {"type": "request", "engine_id": engine, "request_id": fields.pop("name")}
    return _json(names | fields | {"stage": stats.stage.name.lower(), "queued": stats.queued(now)})


def _json(fields: dict[str, Any]) -> str:
    return msgspec.json.encode(fields).decode()

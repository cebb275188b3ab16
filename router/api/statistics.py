"""The figures of heartbeats as messages of the public API."""

import time

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat
from sluice.ring.stats import RequestStats, StepStats
from sluice.v1 import admin_pb2 as pb


def step_message(heartbeat: EngineHeartbeat, stats: StepStats) -> pb.EngineStats:
    """One engine at one step; `time` is left out before the first."""
    fields = msgspec.structs.asdict(stats)
    at, seconds = fields.pop("time"), fields.pop("step_seconds")
    return pb.EngineStats(
        engine_id=heartbeat.engine,
        draining=heartbeat.draining,
        model_fingerprint=heartbeat.fingerprint,
        time=_moment(at or None),
        step_time=_duration(seconds),
        **fields,
    )


def request_message(engine: str, stats: RequestStats) -> pb.RequestStats:
    """One request in an engine."""
    return pb.RequestStats(
        engine_id=engine,
        request_id=stats.name,
        stage=int(stats.stage),  # type: ignore[arg-type]
        arrival=_moment(stats.arrival),
        first_scheduled=_moment(stats.first_scheduled),
        first_token=_moment(stats.first_token),
        last_token=_moment(stats.last_token),
        queued=_duration(stats.queued(time.time())),
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
        pauses=stats.pauses,
        blocks_allocated=stats.blocks_allocated,
        blocks_reused=stats.blocks_reused,
        blocks_missed=stats.blocks_missed,
    )


def detokenizer_message(heartbeat: DetokenizerHeartbeat) -> pb.DetokenizerStats:
    """One detokenizer."""
    return pb.DetokenizerStats(
        detokenizer_id=heartbeat.detokenizer,
        streams=heartbeat.streams,
        queue_depth=heartbeat.queue_depth,
        tokens_per_second=heartbeat.tokens_per_second,
    )


def _moment(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    found = Timestamp()
    found.FromNanoseconds(int(seconds * 1e9))
    return found


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(int(seconds * 1e9))
    return found

"""Messages of AdminService: reports about the ring and its requests, KV cache events."""

from collections.abc import Callable

from router.errors import duration
from sluice.telemetry.status_report import (
    DetokenizerReport,
    EngineReport,
    PeerState,
    RequestReport,
    RouterReport,
    TenantReport,
)
from sluice.v1 import admin_pb2 as pb
from sluice.wire import cache_events as ring

PHASES = {
    None: pb.ENGINE_PHASE_UNSPECIFIED,
    "both": pb.ENGINE_PHASE_BOTH,
    "prefill": pb.ENGINE_PHASE_PREFILL,
    "decode": pb.ENGINE_PHASE_DECODE,
}
TIERS = {ring.Tier.DEVICE: pb.CACHE_TIER_DEVICE, ring.Tier.HOST: pb.CACHE_TIER_HOST}


def engine_info(report: EngineReport) -> pb.EngineInfo:
    return pb.EngineInfo(
        engine_id=report.id,
        address=report.address,
        state=_state(report.state),
        version=report.version,
        model_fingerprint=report.model,
        model_version=report.model_version,
        heartbeat_age=None if report.heartbeat_age is None else duration(report.heartbeat_age),
        phase=PHASES[report.phase],
    )


def detokenizer_info(report: DetokenizerReport) -> pb.DetokenizerInfo:
    return pb.DetokenizerInfo(
        detokenizer_id=report.id,
        address=report.address,
        state=_state(report.state),
        version=report.version,
        heartbeat_age=None if report.heartbeat_age is None else duration(report.heartbeat_age),
    )


def router_stats(router_id: str, report: RouterReport) -> pb.RouterStats:
    return pb.RouterStats(
        router_id=router_id,
        open_requests=report.open,
        ring_requests=report.on_ring,
        waiting_requests=report.waiting,
        admitted_requests=report.admitted,
        max_admitted_requests=report.admitted_limit,
        recovering_requests=report.between_attempts,
        recoveries=sum(report.recoveries.values()),
        ended_requests=sum(report.outcomes.values()),
        completion_tokens=report.completion_tokens,
    )


def tenant_stats(report: TenantReport) -> pb.TenantStats:
    return pb.TenantStats(
        tenant=report.tenant,
        open_requests=report.open,
        waiting_requests=report.waiting,
        admitted_requests=report.admitted,
    )


def request_summary(report: RequestReport) -> pb.RequestSummary:
    return pb.RequestSummary(
        request_id=report.id,
        tenant=report.tenant,
        state=report.state,
        open=report.open,
        duration=duration(report.seconds),
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        completion_tokens=report.completion_tokens,
        attempts=report.attempts,
        engine_id=report.engine or "",
        detokenizer_id=report.detokenizer or "",
        time_to_first_token=None if report.first_token_seconds is None else duration(report.first_token_seconds),
    )


def _state(state: PeerState) -> pb.PeerState.ValueType:
    return pb.PeerState.Value(f"PEER_STATE_{state.upper()}")


def events_message(answer: ring.CacheEvents) -> pb.StreamCacheEventsResponse:
    events = [_event(number, event) for number, event in enumerate(answer.events, answer.first)]
    # All missing events precede the first one.
    events[0].dropped = max(0, answer.first - answer.start)
    return pb.StreamCacheEventsResponse(engine_id=answer.engine, engine_epoch=answer.engine_epoch, events=events)


def _event(number: int, event: ring.CacheEvent) -> pb.CacheEvent:
    return _MAKERS[type(event)](number, event)


def _created(number: int, event: ring.Created) -> pb.CacheEvent:
    device, host = event.blocks
    return pb.CacheEvent(event_id=number, created=pb.CacheCreated(device_blocks=device, host_blocks=host))


def _stored(number: int, event: ring.Stored) -> pb.CacheEvent:
    stored = pb.CacheStored(
        block_hash=event.block,
        parent_hash=event.parent,
        token_ids=event.tokens,
        tier=pb.CACHE_TIER_DEVICE,
        priority=event.priority,
        adapter_version=event.adapter,
    )
    return pb.CacheEvent(event_id=number, stored=stored)


def _removed(number: int, event: ring.Removed) -> pb.CacheEvent:
    return pb.CacheEvent(event_id=number, removed=pb.CacheRemoved(block_hashes=event.blocks))


def _updated(number: int, event: ring.Updated) -> pb.CacheEvent:
    updated = pb.CacheUpdated(
        block_hash=event.block,
        old_tier=TIERS[event.old_tier],
        new_tier=TIERS[event.tier],
        old_priority=event.old_priority,
        new_priority=event.priority,
    )
    return pb.CacheEvent(event_id=number, updated=updated)


_MAKERS: dict[type, Callable[..., pb.CacheEvent]] = {
    ring.Created: _created,
    ring.Stored: _stored,
    ring.Removed: _removed,
    ring.Updated: _updated,
}

"""Converts reports about the ring and its requests into messages of AdminService."""

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


def engine_info(report: EngineReport) -> pb.EngineInfo:
    return pb.EngineInfo(
        engine_id=report.id,
        address=report.address,
        state=_state(report.state),
        version=report.version,
        model_fingerprint=report.model,
        model_version=report.model_version,
        heartbeat_age=None if report.heartbeat_age is None else duration(report.heartbeat_age),
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

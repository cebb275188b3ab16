"""A snapshot of the ring as this router knows it, for /status.json and AdminService."""

import time
from dataclasses import dataclass

from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.requests.admission import Admission
from router.requests.dispatcher import Dispatcher
from router.requests.registry import RequestCounters, Requests, report_of
from router.requests.serving_model import ServingModel
from sluice.telemetry.status_report import (
    DetokenizerReport,
    Distribution,
    EngineReport,
    PeerState,
    RequestReport,
    RouterReport,
    ServiceReport,
    TenantReport,
)

MAX_LISTED = 64
"""Maximum number of requests, and of tenants, that are listed."""


@dataclass(frozen=True)
class Overview:
    """May be read from any thread."""

    _membership: Membership
    _requests: Requests
    _admission: Admission
    _dispatcher: Dispatcher
    _serving: ServingModel
    _counters: RequestCounters

    def report(self, address: str) -> ServiceReport:
        """`address`: the address that clients call."""
        return ServiceReport(
            address, self.router(), self.engines(), self.detokenizers(), self.tenants(), self.latest_requests()
        )

    def router(self) -> RouterReport:
        admission, counters = self._admission, self._counters
        return RouterReport(
            open=len(self._requests.open),
            on_ring=len(self._requests.on_ring),
            waiting=admission.waiting,
            waiting_tokens=admission.waiting_tokens,
            admitted=admission.live,
            admitted_limit=admission.capacity,
            between_attempts=self._dispatcher.between_attempts,
            refused=admission.refused,
            serving_version=self._serving.version,
            outcomes=_summed(dict(counters.requests)),
            recoveries=dict(counters.recoveries),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            completion_tokens=counters.completion_tokens,
            first_token_seconds=Distribution.of(counters.first_token_seconds),
            inter_token_seconds=Distribution.of(counters.inter_token_seconds),
        )

    def engines(self) -> list[EngineReport]:
        """All engines that are configured or were found, sorted by name."""
        return sorted(map(_engine, self._membership.engines.all), key=lambda report: report.id)

    def detokenizers(self) -> list[DetokenizerReport]:
        """All detokenizers that are configured or were found, sorted by name."""
        return sorted(map(_detokenizer, self._membership.detokenizers.all), key=lambda report: report.id)

    def tenants(self) -> list[TenantReport]:
        """Tenants with open requests, busiest first."""
        open_, waiting = self._requests.open_by_tenant, self._admission.waiting_by_tenant
        admitted = self._admission.held_by_tenant
        busiest = sorted(open_, key=lambda tenant: (-open_[tenant], tenant))[:MAX_LISTED]
        return [
            TenantReport(tenant, open_[tenant], waiting.get(tenant, 0), admitted.get(tenant, 0)) for tenant in busiest
        ]

    def latest_requests(self, limit: int = MAX_LISTED) -> list[RequestReport]:
        """Open requests, then ended ones; newest first within each group."""
        newest = self._requests.open[: -limit - 1 : -1]
        return [*map(report_of, newest), *reversed(self._counters.latest.copy())][:limit]


def _state(peer: EnginePeer | DetokenizerPeer) -> PeerState:
    if peer.heartbeat is None:
        return "unknown"
    if not peer.alive:
        return "lost"
    if peer.stalled:
        return "stalled"
    if peer.unreachable:
        return "unreachable"
    return "draining" if peer.draining else "serving"


def _heartbeat_age(peer: EnginePeer | DetokenizerPeer) -> float | None:
    return None if peer.heartbeat is None else max(0.0, time.monotonic() - peer.last_heartbeat_at)


def _engine(peer: EnginePeer) -> EngineReport:
    heartbeat, common = peer.heartbeat, (peer.name, _state(peer), peer.address, _heartbeat_age(peer))
    if heartbeat is None:
        return EngineReport(*common)
    report = EngineReport(
        *common,
        heartbeat.version,
        heartbeat.fingerprint,
        heartbeat.model_version,
        heartbeat.phase,
        max_batch_size=heartbeat.max_batch_size,
    )
    return report.with_stats(heartbeat.stats)


def _detokenizer(peer: DetokenizerPeer) -> DetokenizerReport:
    heartbeat, common = peer.heartbeat, (peer.name, _state(peer), peer.address, _heartbeat_age(peer))
    if heartbeat is None:
        return DetokenizerReport(*common)
    return DetokenizerReport(
        *common, heartbeat.version, heartbeat.streams, heartbeat.queue_depth, heartbeat.tokens_per_second
    )


def _summed(by_outcome_and_status: dict[tuple[str, str], int]) -> dict[str, int]:
    by_outcome: dict[str, int] = {}
    for (outcome, _), count in by_outcome_and_status.items():
        by_outcome[outcome] = by_outcome.get(outcome, 0) + count
    return by_outcome

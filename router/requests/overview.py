"""What a router knows of its ring at this moment, for /status.json and AdminService."""

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

MOST_LISTED = 64
"""Of requests, and of tenants."""


@dataclass(frozen=True)
class Overview:
    """May be read by other threads."""

    _membership: Membership
    _requests: Requests
    _admission: Admission
    _dispatcher: Dispatcher
    _serving: ServingModel
    _counters: RequestCounters

    def report(self, address: str) -> ServiceReport:
        """`address`: where clients call."""
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
        """All that are configured or were found, by name."""
        return sorted(map(_engine, self._membership.engines.all), key=lambda report: report.id)

    def detokenizers(self) -> list[DetokenizerReport]:
        """As `engines`."""
        return sorted(map(_detokenizer, self._membership.detokenizers.all), key=lambda report: report.id)

    def tenants(self) -> list[TenantReport]:
        """Those with open requests, the busiest first."""
        open_, waiting = self._requests.open_by_tenant, self._admission.waiting_by_tenant
        admitted = self._admission.held_by_tenant
        busiest = sorted(open_, key=lambda tenant: (-open_[tenant], tenant))[:MOST_LISTED]
        return [
            TenantReport(tenant, open_[tenant], waiting.get(tenant, 0), admitted.get(tenant, 0)) for tenant in busiest
        ]

    def latest_requests(self, most: int = MOST_LISTED) -> list[RequestReport]:
        """The open ones, then those that have ended; the newest first."""
        newest = self._requests.open[: -most - 1 : -1]
        return [*map(report_of, newest), *reversed(self._counters.latest.copy())][:most]


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
    found, common = peer.heartbeat, (peer.name, _state(peer), peer.address, _heartbeat_age(peer))
    if found is None:
        return EngineReport(*common)
    return EngineReport(*common, found.version, found.fingerprint, found.model_version).with_stats(found.stats)


def _detokenizer(peer: DetokenizerPeer) -> DetokenizerReport:
    found, common = peer.heartbeat, (peer.name, _state(peer), peer.address, _heartbeat_age(peer))
    if found is None:
        return DetokenizerReport(*common)
    return DetokenizerReport(*common, found.version, found.streams, found.queue_depth, found.tokens_per_second)


def _summed(by_outcome_and_status: dict[tuple[str, str], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (outcome, _), count in by_outcome_and_status.items():
        found[outcome] = found.get(outcome, 0) + count
    return found

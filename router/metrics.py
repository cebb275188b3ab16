"""Prometheus metrics of a router; docs/metrics.md lists them."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from router.access.access import Access
from router.api.stats_broadcast import StatsBroadcast
from router.peers.peers import Peers
from router.requests.serving_model import engines_by_model
from router.ring_side import RingSide
from router.trace_queue import TraceQueue
from sluice.host.output import lines_lost
from sluice.telemetry.metrics import counter, gauge, histogram

P = "sluice_router_"


def read(ring: RingSide, stats: StatsBroadcast, access: Access, traces: TraceQueue | None) -> Iterator[Metric]:
    """Called in the thread of the scrape."""
    yield from _requests(ring)
    yield from _admission(ring)
    yield from _peers(ring)
    yield counter(P + "quarantines", "Attempts that ran alone on an engine.", ring.suspects.quarantines)
    text = "Requests ended with POISON, because engines died while they ran them."
    yield counter(P + "poisoned_requests", text, ring.suspects.poisoned)
    yield gauge(P + "steps_listeners", "Open StreamSteps calls.", stats.subscribers)
    yield counter(P + "steps_lost", "Step and request reports dropped for slow StreamSteps clients.", stats.lost)
    yield from _access(access)
    yield counter(P + "spans_sent", "Spans that the collector accepted.", traces.sent if traces else 0)
    text = "Spans dropped because the queue was full or the collector did not accept them."
    yield counter(P + "spans_dropped", text, traces.dropped if traces else 0)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())


def _requests(ring: RingSide) -> Iterator[Metric]:
    text = "Requests that ended, by finish reason or error code (MIXED: several among the outputs) and gRPC status."
    yield counter(P + "requests", text, ring.counters.requests, ("outcome", "status"))
    yield gauge(P + "requests_open", "Requests whose response has not ended.", len(ring.requests.open))
    yield gauge(P + "requests_on_ring", "Requests with an attempt on the ring.", len(ring.requests.on_ring))
    yield gauge(P + "draining", "1 while draining: no new requests are accepted.", float(ring.requests.closed))
    text = "Attempts replaced by a new one, by reason (SLOW_CLIENT: paused until the client has read its backlog)."
    yield counter(P + "recoveries", text, ring.counters.recoveries, ("reason",))
    text = "Attempts that were to compute a prompt and hand over, by outcome (continued, ended, lost)."
    yield counter(P + "handovers", text, ring.counters.handovers, ("outcome",))
    yield counter(P + "prompt_tokens", "Prompt tokens of ended requests.", ring.counters.prompt_tokens)
    yield counter(P + "cached_tokens", "Prompt tokens served from a prefix cache.", ring.counters.cached_tokens)
    yield counter(P + "completion_tokens", "Tokens generated for ended requests.", ring.counters.completion_tokens)
    yield histogram(
        P + "request_seconds", "Time from arrival to the end of the response.", ring.counters.request_seconds
    )
    yield histogram(P + "queue_seconds", "Time from arrival to submission to an engine.", ring.counters.queue_seconds)
    yield histogram(
        P + "first_token_seconds", "Time from arrival to the first token.", ring.counters.first_token_seconds
    )
    text = "Time between two tokens of a sequence; tokens that arrive together share the time evenly."
    yield histogram(P + "inter_token_seconds", text, ring.counters.inter_token_seconds)


def _admission(ring: RingSide) -> Iterator[Metric]:
    yield gauge(P + "permits", "Requests admitted to the ring at present.", ring.admission.live)
    yield gauge(P + "permits_limit", "Maximum number of requests admitted at the same time.", ring.admission.capacity)
    yield gauge(P + "queue_requests", "Requests that wait for admission.", ring.admission.waiting)
    yield gauge(P + "queue_tokens", "Prompt and resumed tokens of waiting requests.", ring.admission.waiting_tokens)
    yield counter(P + "admission_refusals", "Requests refused because the queue was full.", ring.admission.refused)


def _peers(ring: RingSide) -> Iterator[Metric]:
    kinds: dict[str, Peers[Any]] = {"engine": ring.membership.engines, "detokenizer": ring.membership.detokenizers}
    alive = {kind: sum(peer.alive for peer in peers.all) for kind, peers in kinds.items()}
    usable = {kind: sum(peer.usable for peer in peers.all) for kind, peers in kinds.items()}
    yield gauge(P + "peers_alive", "Live engines and detokenizers.", alive, ("kind",))
    yield gauge(P + "peers_usable", "Engines and detokenizers that accept new work.", usable, ("kind",))
    text = "Different models (weights, configuration, dtype) that live engines serve; normally 1."
    yield gauge(P + "models", text, len(engines_by_model(ring.membership.engines.all)))
    text = "Engines that accept new requests, by the version that new requests are sent to (empty: any version)."
    serving = {ring.serving.version: ring.serving.count(peer for peer in ring.membership.engines.all if peer.usable)}
    yield gauge(P + "serving_engines", text, serving, ("version",))
    unknown = {kind: peers.unknown for kind, peers in kinds.items()}
    yield counter(P + "beats_unknown", "Heartbeats from peers that are not configured.", unknown, ("kind",))
    text = "Requests waiting for their next attempt: for peers, or for a slow client to read."
    yield gauge(P + "requests_between_attempts", text, ring.dispatcher.between_attempts)
    yield counter(P + "frames_malformed", "Malformed frames dropped.", ring.inbox.malformed)
    yield counter(P + "peers_refused", "Connections refused because their key is not admitted.", ring.inbox.refused)
    yield counter(P + "frame_gaps", "Gaps in the frame numbers of a lane: frames were lost.", ring.inbox.gaps)
    text = "Rows received for requests or attempts that are no longer on the ring."
    yield counter(P + "rows_late", text, ring.dispatcher.late_rows)


def _access(access: Access) -> Iterator[Metric]:
    text = "Calls refused by authentication or authorization."
    yield counter(P + "refused_calls", text, access.refused, ("reason",))
    yield counter(P + "tls_handshakes", "TLS handshakes started.", access.handshakes.begun)
    text = "TLS handshakes that led to a call; the difference is rejected handshakes and connections without calls."
    yield counter(P + "tls_connections", text, access.handshakes.used)
    text = "Reloads of changed certificate and token files, by outcome; after a failure the old contents stay in use."
    yield counter(P + "file_reloads", text, access.reloads.counts, ("outcome",))

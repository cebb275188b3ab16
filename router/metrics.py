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
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.telemetry.output import lines_lost

P = "sluice_router_"


def read(ring: RingSide, stats: StatsBroadcast, access: Access, traces: TraceQueue | None) -> Iterator[Metric]:
    """Called from the scrape's thread."""
    yield from _requests(ring)
    yield from _admission(ring)
    yield from _peers(ring)
    yield counter(P + "quarantines", "Attempts that ran alone on an engine.", ring.suspects.quarantines)
    text = "Requests that ended with POISON: engines died under them."
    yield counter(P + "poisoned_requests", text, ring.suspects.poisoned)
    yield gauge(P + "steps_listeners", "Open StreamSteps calls.", stats.subscribers)
    yield counter(P + "steps_lost", "Steps and requests that a slow StreamSteps client missed.", stats.lost)
    yield from _access(access)
    yield counter(P + "spans_sent", "Spans that the collector accepted.", traces.sent if traces else 0)
    text = "Spans that the collector did not accept, or that found the queue full."
    yield counter(P + "spans_dropped", text, traces.dropped if traces else 0)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())


def _requests(ring: RingSide) -> Iterator[Metric]:
    text = "Requests that ended, by finish reason or error code (MIXED: outputs differ), and gRPC status."
    yield counter(P + "requests", text, ring.counters.requests, ("outcome", "status"))
    yield gauge(P + "requests_open", "Requests whose answer has not ended.", len(ring.requests.open))
    yield gauge(P + "requests_on_ring", "Requests with an attempt on the ring.", len(ring.requests.on_ring))
    yield gauge(P + "draining", "1 if no new requests are accepted.", float(ring.requests.closed))
    text = "Attempts given up for another one, by reason (SLOW_CLIENT: paused until its client has read)."
    yield counter(P + "recoveries", text, ring.counters.recoveries, ("reason",))
    yield counter(P + "prompt_tokens", "Prompt tokens of ended requests.", ring.counters.prompt_tokens)
    yield counter(P + "cached_tokens", "Of those, served from a prefix cache.", ring.counters.cached_tokens)
    yield counter(P + "completion_tokens", "Tokens generated for ended requests.", ring.counters.completion_tokens)
    yield histogram(P + "request_seconds", "From arrival to the end of the answer.", ring.counters.request_seconds)
    yield histogram(P + "queue_seconds", "From arrival to the submit to an engine.", ring.counters.queue_seconds)
    yield histogram(P + "first_token_seconds", "From arrival to the first token.", ring.counters.first_token_seconds)
    text = "Between two tokens of a sequence; tokens that arrive together share the time."
    yield histogram(P + "inter_token_seconds", text, ring.counters.inter_token_seconds)


def _admission(ring: RingSide) -> Iterator[Metric]:
    yield gauge(P + "permits", "Requests admitted to the ring.", ring.admission.live)
    yield gauge(P + "permits_limit", "Requests that may be admitted at the same time.", ring.admission.capacity)
    yield gauge(P + "queue_requests", "Requests that wait for admission.", ring.admission.waiting)
    yield gauge(P + "queue_tokens", "Their prompt tokens and resumed tokens.", ring.admission.waiting_tokens)
    yield counter(P + "admission_refusals", "Requests refused because that queue was full.", ring.admission.refused)


def _peers(ring: RingSide) -> Iterator[Metric]:
    kinds: dict[str, Peers[Any]] = {"engine": ring.membership.engines, "detokenizer": ring.membership.detokenizers}
    alive = {kind: sum(peer.alive for peer in peers.all) for kind, peers in kinds.items()}
    usable = {kind: sum(peer.usable for peer in peers.all) for kind, peers in kinds.items()}
    yield gauge(P + "peers_alive", "Live engines and detokenizers.", alive, ("kind",))
    yield gauge(P + "peers_usable", "Of those, that take new work.", usable, ("kind",))
    text = "Models, by weights, configuration and dtype, that live engines serve; more than 1: mixed."
    yield gauge(P + "models", text, len(engines_by_model(ring.membership.engines.all)))
    text = "Engines that accept work, by the version that new requests are sent to (empty: any version)."
    serving = {ring.serving.version: ring.serving.count(peer for peer in ring.membership.engines.all if peer.usable)}
    yield gauge(P + "serving_engines", text, serving, ("version",))
    unknown = {kind: peers.unknown for kind, peers in kinds.items()}
    yield counter(P + "beats_unknown", "Heartbeats of peers that are not configured.", unknown, ("kind",))
    text = "Requests that wait for another attempt: for peers, or for their own client to read."
    yield gauge(P + "requests_between_attempts", text, ring.dispatcher.between_attempts)
    yield counter(P + "frames_malformed", "Malformed frames dropped.", ring.inbox.malformed)
    yield counter(P + "peers_refused", "Connections refused because the peer has no admitted key.", ring.inbox.refused)
    yield counter(P + "frame_gaps", "Gaps in the frame numbers of a lane.", ring.inbox.gaps)
    text = "Rows of requests or attempts that are not on the ring any more."
    yield counter(P + "rows_late", text, ring.dispatcher.late_rows)


def _access(access: Access) -> Iterator[Metric]:
    text = "Calls refused by authentication or authorization."
    yield counter(P + "refused_calls", text, access.refused, ("reason",))
    yield counter(P + "tls_handshakes", "TLS handshakes begun.", access.handshakes.begun)
    text = "Of those, that led to a call. A growing gap means rejected handshakes, or connections without calls."
    yield counter(P + "tls_connections", text, access.handshakes.used)
    text = "Changed certificate and token files, by outcome of the reload; after a failure the old ones stay in use."
    yield counter(P + "file_reloads", text, access.reloads.counts, ("outcome",))

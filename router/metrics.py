"""What a router shows to Prometheus; docs/metrics.md lists it. Called from the thread of a scrape."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from router.access.access import Access
from router.api.stats_broadcast import StatsBroadcast
from router.peers.inbox import RouterInbox
from router.peers.membership import Membership
from router.peers.peers import Peers
from router.requests.admission import Admission
from router.requests.counters import RequestCounters
from router.requests.dispatcher import Dispatcher
from router.requests.registry import Requests
from router.requests.serving_model import engines_by_model
from router.requests.suspects import Suspects
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.telemetry.output import lines_lost

P = "sluice_router_"


def requests(tally: RequestCounters, live: Requests) -> Iterator[Metric]:
    """Requests, tokens, times."""
    text = "Requests that ended, by finish reason or error code (MIXED: outputs differ), and gRPC status."
    yield counter(P + "requests", text, tally.requests, ("outcome", "status"))
    yield gauge(P + "requests_open", "Requests whose answer has not ended.", len(live.open))
    yield gauge(P + "requests_on_ring", "Requests submitted to an engine whose end has not come.", len(live.on_ring))
    yield gauge(P + "draining", "1 if no new requests are taken.", float(live.closed))
    text = "Attempts given up for another one, by what went wrong (SLOW_CLIENT: until its client has read)."
    yield counter(P + "recoveries", text, tally.recoveries, ("reason",))
    yield counter(P + "prompt_tokens", "Prompt tokens of ended requests.", tally.prompt_tokens)
    yield counter(P + "cached_tokens", "Of those, served from a prefix cache.", tally.cached_tokens)
    yield counter(P + "completion_tokens", "Tokens generated for ended requests.", tally.completion_tokens)
    yield histogram(P + "request_seconds", "From arrival to the end of the answer.", tally.request_seconds)
    yield histogram(P + "queue_seconds", "From arrival to the submit to an engine.", tally.queue_seconds)
    text = "From arrival to the first token."
    yield histogram(P + "first_token_seconds", text, tally.first_token_seconds)
    text = "Between two tokens of a sequence; those that come together share the time."
    yield histogram(P + "inter_token_seconds", text, tally.inter_token_seconds)


def admission(found: Admission) -> Iterator[Metric]:
    """The queue in front of the ring."""
    yield gauge(P + "permits", "Requests admitted to the ring.", found.live)
    yield gauge(P + "permits_limit", "Requests that may be.", found.capacity)
    yield gauge(P + "queue_requests", "Requests that wait for admission.", found.waiting)
    yield gauge(P + "queue_tokens", "Their prompt tokens.", found.waiting_tokens)
    yield counter(P + "admission_refusals", "Requests refused because that queue was full.", found.refused)


def ring(members: Membership, inbox: RouterInbox, dispatcher: Dispatcher) -> Iterator[Metric]:
    """Peers and lanes."""
    kinds: dict[str, Peers[Any]] = {"engine": members.engines, "detokenizer": members.detokenizers}
    alive = {kind: sum(peer.alive for peer in peers.all) for kind, peers in kinds.items()}
    usable = {kind: sum(peer.usable for peer in peers.all) for kind, peers in kinds.items()}
    yield gauge(P + "peers_alive", "Engines and detokenizers that are heard.", alive, ("kind",))
    yield gauge(P + "peers_usable", "Of those, that take new work.", usable, ("kind",))
    models = len(engines_by_model(members.engines.all))
    text = "Models, by weights, configuration and dtype, that the engines that are heard serve; more than 1: mixed."
    yield gauge(P + "models", text, models)
    unknown = {kind: peers.unknown for kind, peers in kinds.items()}
    yield counter(P + "beats_unknown", "Heartbeats of peers that are not configured.", unknown, ("kind",))
    text = "Requests that wait for another attempt: for peers, or for their own client to read."
    yield gauge(P + "requests_between_attempts", text, dispatcher.between_attempts)
    yield counter(P + "frames_malformed", "Frames dropped because they were none.", inbox.malformed)
    yield counter(P + "peers_refused", "Attempts to connect without a key that is admitted.", inbox.refused)
    yield counter(P + "frame_gaps", "Times that frames of a lane never came.", inbox.gaps)
    yield counter(P + "rows_late", "Rows of requests that are not on the ring any more.", dispatcher.late_rows)


def suspects(found: Suspects) -> Iterator[Metric]:
    """Requests under which engines die."""
    yield counter(P + "quarantines", "Attempts that ran alone on an engine.", found.quarantines)
    yield counter(P + "poisoned_requests", "Requests that ended with POISON: engines died under them.", found.poisoned)


def steps(found: StatsBroadcast) -> Iterator[Metric]:
    """StreamSteps."""
    yield gauge(P + "steps_listeners", "Calls of StreamSteps.", found.listeners)
    yield counter(P + "steps_lost", "Steps and requests that a slow listener missed.", found.lost)


def access(found: Access) -> Iterator[Metric]:
    """Who was not let in; files of certificates and tokens."""
    text = "Calls refused because of who made them."
    yield counter(P + "refused_calls", text, found.refused, ("reason",))
    yield counter(P + "tls_handshakes", "TLS handshakes that began.", found.handshakes.begun)
    text = "Of those, that brought a call; the others: refused certificates, no TLS, nothing asked yet."
    yield counter(P + "tls_connections", text, found.handshakes.used)
    text = "Changes of certificates and tokens, by what came of them; after failed the old ones stay."
    yield counter(P + "file_reloads", text, found.reloads.counts, ("outcome",))


def log() -> Iterator[Metric]:
    """What the log lacks."""
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())

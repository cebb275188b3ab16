"""The gateway's counters, and its Prometheus metrics, which docs/metrics.md lists."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from gateway.byte_budget import ByteBudget
from sluice.host.output import lines_lost
from sluice.telemetry.measures import Histogram
from sluice.telemetry.metrics import counter, gauge, histogram

P = "sluice_gateway_"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True)
class Counters:
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests that ended, by path and status. 499: the client disconnected before the end."""
    open: int = 0
    """Requests in progress."""
    refused: int = 0
    """Requests refused because `max_requests` were open."""
    unknown_fields: int = 0
    """Request fields that the gateway does not know."""
    events: int = 0
    """Server-sent events, not counting comments."""
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))


def read(counters: Counters, budget: ByteBudget) -> Iterator[Metric]:
    """Called in the thread of the scrape."""
    text = "Requests that ended, by path and HTTP status (499: the client disconnected before the end)."
    yield counter(P + "requests", text, counters.requests, ("path", "status"))
    yield gauge(P + "requests_open", "Requests in progress.", counters.open)
    yield counter(P + "refusals", "Requests refused because too many were in progress.", counters.refused)
    yield gauge(P + "body_bytes", "Size of the bodies that are being received or processed.", budget.used)
    yield counter(P + "bodies_refused", "Bodies that exceeded the memory for bodies.", budget.refused)
    yield counter(P + "unknown_fields", "Unknown fields in requests.", counters.unknown_fields)
    yield counter(P + "events", "Server-sent events, excluding comments.", counters.events)
    yield histogram(P + "request_seconds", "Time from arrival to the end of the response.", counters.request_seconds)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())

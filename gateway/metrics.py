"""Prometheus metrics of a gateway; docs/metrics.md lists them."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from gateway.byte_budget import ByteBudget
from gateway.counters import Counters
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.telemetry.output import lines_lost

P = "sluice_gateway_"


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

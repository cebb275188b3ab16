"""Prometheus metrics of a gateway; docs/metrics.md lists them."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from gateway.counters import Counters
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.telemetry.output import lines_lost

P = "sluice_gateway_"


def read(counters: Counters) -> Iterator[Metric]:
    """Called from the scrape's thread."""
    text = "Requests that ended, by path and HTTP status (499: the client disconnected before the end)."
    yield counter(P + "requests", text, counters.requests, ("path", "status"))
    yield gauge(P + "requests_open", "Requests in progress.", counters.open)
    yield counter(P + "refusals", "Requests refused because too many were in progress.", counters.refused)
    yield counter(P + "unknown_fields", "Fields of requests that the gateway does not know.", counters.unknown_fields)
    yield counter(P + "events", "Server-sent events, comments apart.", counters.events)
    yield histogram(P + "request_seconds", "From arrival to the end of the answer.", counters.request_seconds)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())

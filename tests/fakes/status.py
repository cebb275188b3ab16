"""A metrics server without a service."""

from prometheus_client import CollectorRegistry

from sluice.telemetry.pages import Page
from sluice.telemetry.probes import Health
from sluice.telemetry.server import StatusServer
from sluice.telemetry.service_status import ProgressBeacon


def serve_metrics(registry: CollectorRegistry) -> StatusServer:
    """Serve these metrics on any free port of 127.0.0.1. The caller closes the server."""
    return StatusServer(Page(registry, Health(ProgressBeacon(), 120, 30, lambda: None)), "127.0.0.1", 0)

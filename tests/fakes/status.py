"""The HTTP side of a service that has nothing else."""

from prometheus_client import CollectorRegistry

from sluice.telemetry.pages import Page
from sluice.telemetry.server import Health, StatusServer
from sluice.telemetry.service_status import ProgressBeacon


def serve_metrics(registry: CollectorRegistry) -> StatusServer:
    """On any port; to be closed."""
    return StatusServer(Page(registry, Health(ProgressBeacon(), 120, 30, lambda: None)), "127.0.0.1", 0)

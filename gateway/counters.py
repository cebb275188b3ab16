"""The gateway's counters; metrics.py exports them to Prometheus."""

from collections import Counter
from dataclasses import dataclass, field

from sluice.telemetry.measures import Histogram

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

"""An admission queue built from the few settings that tests vary."""

import time
from collections.abc import Callable, Mapping

from router.requests.admission import Admission
from sluice.settings.router import AdmissionSettings


def make_admission(
    live: int,
    waiting: int,
    waiting_tokens: int,
    tenant_waiting: int | None = None,
    aging_seconds: float = 0.0,
    weights: Mapping[str, float] | None = None,
    reserved: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> Admission:
    """By default there is no aging, nothing is reserved for tenants, and one tenant may fill the queue."""
    settings = AdmissionSettings(
        priority_aging_seconds=aging_seconds,
        max_live=live,
        max_waiting=waiting,
        max_waiting_tokens=waiting_tokens,
        max_tenant_waiting=waiting if tenant_waiting is None else tenant_waiting,
        tenant_weights=dict(weights or {}),
        tenant_reserved_fraction=reserved,
    )
    return Admission(settings, clock)

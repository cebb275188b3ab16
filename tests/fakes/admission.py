"""An admission queue with few settings."""

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
    """No ageing, nothing reserved, and by default one tenant may fill the queue."""
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

"""The probes of a service, /livez and /readyz, while it starts and afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sluice.telemetry.service_status import ProgressBeacon


class Probes(Protocol):
    """The answers of /livez and /readyz."""

    def dead(self) -> str | None:
        """The reason why the service is not live; None if it is."""

    def not_ready(self) -> str | None:
        """The reason why the service is not ready; None if it is."""


class Startup:
    """`Probes` of a service that is starting: live, but not ready. One thread reports, any thread may read."""

    def __init__(self) -> None:
        self.loaded = 0.0
        """Fraction of the weights loaded so far."""
        self._stage = "starting"

    def report(self, stage: str, done: int, total: int) -> None:
        """`stage`: "loading" for the weights, or the name of another slow stage."""
        fraction = done / total if total else 1.0
        if stage == "loading":
            self.loaded = fraction
        self._stage = f"{stage} {fraction:.0%}".replace("%", " %")

    def end(self) -> None:
        """Call when the service is ready."""
        self.loaded = 1.0

    def dead(self) -> None:
        """Always live: restarting a service that loads slowly would not help."""

    def not_ready(self) -> str:
        return self._stage


@dataclass(frozen=True, slots=True)
class Health:
    """The probes of a running service."""

    beacon: ProgressBeacon
    live_stall: float
    """Seconds without an iteration of the loop after which the service counts as dead. Longer than any step takes."""
    ready_stall: float
    """Seconds without an iteration of the loop, or without progress, after which the service is not ready."""
    unready: Callable[[], str | None]
    """Returns a reason of the service's own for not being ready, or None. Called in the thread of the probe."""

    def dead(self) -> str | None:
        seconds = self.beacon.seconds_since_run
        return f"the loop has not run for {seconds:.1f} s" if seconds > self.live_stall else None

    def not_ready(self) -> str | None:
        if self.beacon.seconds_since_run > self.ready_stall:
            return f"the loop has not run for {self.beacon.seconds_since_run:.1f} s"
        if self.beacon.seconds_since_progress > self.ready_stall:
            return f"there is work, but no progress for {self.beacon.seconds_since_progress:.1f} s"
        return self.unready()

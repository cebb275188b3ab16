"""Health that means progress: liveness (the loop turns) and readiness (it takes work and gets it done) apart."""

from collections.abc import Callable
from dataclasses import dataclass

from sluice.telemetry.progress_beacon import ProgressBeacon


@dataclass(frozen=True, slots=True)
class Health:
    """What /livez and /readyz say of a service."""

    pulse: ProgressBeacon
    live_stall: float
    """Seconds that its loop may stand still before it counts as dead: one step may be long."""
    ready_stall: float
    """Seconds without progress after which it is not ready."""
    unready: Callable[[], str | None]
    """Why else it is not ready. Called in the thread of whoever asks."""

    def dead(self) -> str | None:
        """Why it is not alive; None: it is."""
        still = self.pulse.still
        return f"the loop has not turned for {still:.1f} s" if still > self.live_stall else None

    def not_ready(self) -> str | None:
        """Why it is not ready; None: it is."""
        if self.pulse.still > self.ready_stall:
            return f"the loop has not turned for {self.pulse.still:.1f} s"
        if self.pulse.stuck > self.ready_stall:
            return f"there is work, and nothing has moved for {self.pulse.stuck:.1f} s"
        return self.unready()

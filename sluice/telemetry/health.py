"""Health that means progress: liveness (the loop turns) and readiness (it takes work and gets it done) apart."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sluice.telemetry.service_status import StatusFile

TOUCH_SECONDS = 1.0
"""Between two touches of the status file: far less than the launcher's freeze_timeout, far more than a step."""


class ProgressBeacon:
    """Shows probes and the launcher that a service's loop turns. One thread touches it, any may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, status_file: StatusFile | None = None) -> None:
        self.turns = 0
        """Number of touches."""
        self._status_file = status_file
        self._clock = clock
        self._turned_at = self._moved_at = clock()
        self._file_touched_at = float("-inf")

    @property
    def still(self) -> float:
        """Seconds since the loop last turned."""
        return self._clock() - self._turned_at

    @property
    def stuck(self) -> float:
        """Seconds since the loop last made progress, or had nothing to do."""
        return self._clock() - self._moved_at

    def touch(self, moving: bool = True) -> None:
        """The loop has turned. `moving`: and made progress with its work, if there was any."""
        self.turns += 1
        now = self._turned_at = self._clock()
        if moving:
            self._moved_at = now
        if self._status_file is not None and now - self._file_touched_at >= TOUCH_SECONDS:
            self._file_touched_at = now
            self._status_file.touch()


@dataclass(frozen=True, slots=True)
class Health:
    """Answers of /livez and /readyz: None if the service is fine, else the reason why not."""

    beacon: ProgressBeacon
    live_stall: float
    """Seconds without a turn of the loop after which the service counts as dead. One step may be long."""
    ready_stall: float
    """Seconds without progress after which it is not ready."""
    unready: Callable[[], str | None]
    """The service's own reason not to be ready. Called in the thread of the probe."""

    def dead(self) -> str | None:
        still = self.beacon.still
        return f"the loop has not turned for {still:.1f} s" if still > self.live_stall else None

    def not_ready(self) -> str | None:
        if self.beacon.still > self.ready_stall:
            return f"the loop has not turned for {self.beacon.still:.1f} s"
        if self.beacon.stuck > self.ready_stall:
            return f"there is work, and nothing has moved for {self.beacon.stuck:.1f} s"
        return self.unready()

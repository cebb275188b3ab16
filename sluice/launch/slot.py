"""A service's place in the ring, and the process that fills it now."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from sluice.launch.backoff import Backoff
from sluice.launch.child import Child
from sluice.launch.plan import Service


@dataclass(slots=True)
class Slot:
    """Written by the supervisor's thread only. Times are of the monotonic clock."""

    service: Service
    pulse_file: Path
    """The service touches it while its loop turns, from the first turn on."""
    backoff: Backoff
    child: Child | None = None
    """Also one that has ended, until the next begins."""
    ready_at: float | None = None
    """When this child said that it listens."""
    address: str = ""
    """Of a router, from its first readiness on."""
    heard: set[str] = field(default_factory=set)
    """By a router: the peers that it knows to live."""
    due: float | None = None
    """When the next child is to begin."""
    returning: bool = False
    """It has been started again, and nobody has been told yet that it serves."""
    given_up: bool = False
    stopping_until: float | None = None
    """It was told to end, to be started again; at this time it is killed."""
    restarted: Future[None] | None = None
    """Somebody waits for that."""
    pulse: int = 0
    """The latest touch, in nanoseconds of the file system's clock; 0: none yet."""
    pulse_at: float = 0.0
    """When that was seen."""
    frozen: bool = False
    """Killed for that it stood still."""

    @property
    def name(self) -> str:
        """Such as "engine-0"."""
        return self.service.name

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.child is not None and self.child.alive

    @property
    def ready(self) -> bool:
        """Whether its process listens."""
        return self.ready_at is not None

    def begin(self, child: Child) -> None:
        """A process fills it."""
        self.child, self.due = child, None

    def clear(self) -> None:
        """Forget what was known of the last process."""
        self.ready_at = self.stopping_until = None
        self.heard = set()
        self.pulse, self.frozen = 0, False
        self.pulse_file.unlink(missing_ok=True)

    def look(self, now: float) -> float:
        """Seconds since its loop turned last, as far as is known, or since it said that it listens; 0 before that."""
        try:
            touched = self.pulse_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0.0 if self.ready_at is None else now - self.ready_at
        if touched != self.pulse:
            self.pulse, self.pulse_at = touched, now
        return now - self.pulse_at

"""A service's slot in the ring: its current process, its state, and when its next process may start."""

from concurrent.futures import Future
from dataclasses import dataclass

from sluice.launch.hosts import Child
from sluice.launch.plan import Service
from sluice.telemetry.service_status import StatusReader

FIRST_SECONDS = 0.2
LONGEST_SECONDS = 10.0
HEALTHY_SECONDS = 60.0


@dataclass(slots=True)
class Backoff:
    """The delay before a restart. Doubles with each consecutive exit; HEALTHY_SECONDS of healthy uptime reset it."""

    max_failed_starts: int
    exits: int = 0
    failed_starts: int = 0

    def after(self, ready_seconds: float | None) -> float | None:
        """Seconds to wait after an exit. None: do not restart the service.

        `ready_seconds`: how long the process was ready; None if it never was.
        """
        if ready_seconds is not None:
            # A service that was ready is not broken: the cause of its exit may not occur again.
            self.failed_starts = 0
            if ready_seconds >= HEALTHY_SECONDS:
                self.exits = 0
        else:
            self.failed_starts += 1
        self.exits += 1
        if self.failed_starts >= self.max_failed_starts:
            return None
        # The exponent is bounded because 2.0 ** 1024 overflows.
        return min(FIRST_SECONDS * 2.0 ** min(self.exits - 1, 10), LONGEST_SECONDS)


@dataclass(slots=True)
class Slot:
    """The state of one service. Written only by the supervisor's thread. Times are monotonic."""

    service: Service
    reader: StatusReader
    backoff: Backoff
    child: Child | None = None
    """The running process, or the last one until the next starts."""
    ready_at: float | None = None
    """Time at which this child was first seen to be ready."""
    address: str = ""
    """Public address of a router, known from the first time that it was ready."""
    start_at: float | None = None
    """Time at which to start the next child."""
    returning: bool = False
    """Whether the service was restarted and its recovery has not been logged yet."""
    given_up: bool = False
    """Whether the service has failed permanently: it is restarted only on request."""
    kill_at: float | None = None
    """Time at which to kill the child, which is draining for a restart."""
    restarted: Future[None] | None = None
    """Result of the `restart` call in progress."""
    frozen: bool = False
    """Whether the child was killed because its event loop did not run."""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    @property
    def ready(self) -> bool:
        return self.reader.status.state == "ready"

    @property
    def inbox(self) -> str:
        """Address of the service's ring inbox. Empty before it is ready, and for routers."""
        return "" if self.service.role == "router" else self.reader.status.address

    def receives(self, peer: "Slot") -> bool:
        """Whether this router receives heartbeats from the current process in the peer's slot."""
        return self.reader.status.peers.get(peer.name) == peer.reader.status.epoch

    def clear(self) -> None:
        self.ready_at = self.kill_at = None
        self.frozen = False
        # Otherwise the status file of the last process would make the next one appear ready.
        self.reader.reset()

    def poll(self, now: float) -> None:
        self.reader.poll(now)
        if not self.ready:
            return
        if self.ready_at is None:
            self.ready_at = now
        address = self.reader.status.address
        port = address.rpartition(":")[2]
        if self.service.role == "router" and address != self.address and port.isdecimal():
            # Restart the router on the same port, even if it was any free port: clients know its address now.
            self.address, self.service = address, self.service.on_port(int(port))

    def stalled_seconds(self, now: float) -> float:
        """Seconds since the service's event loop last ran. 0 before the service is ready."""
        ran_at = self.reader.ran_at
        return 0.0 if ran_at is None else now - ran_at

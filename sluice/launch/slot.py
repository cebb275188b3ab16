"""A service's place in the ring, the process that runs there now, and when the next one may start."""

from concurrent.futures import Future
from dataclasses import dataclass

from sluice.launch.child import Child
from sluice.launch.plan import Service
from sluice.telemetry.service_status import StatusReader

FIRST_SECONDS = 0.2
LONGEST_SECONDS = 10.0
HEALTHY_SECONDS = 60.0


@dataclass(slots=True)
class Backoff:
    """The wait before a restart: doubles with each exit in a row; HEALTHY_SECONDS of healthy uptime reset it."""

    max_failed_starts: int
    exits: int = 0
    failed_starts: int = 0

    def after(self, ready_seconds: float | None) -> float | None:
        """Seconds to wait after an exit; None: give up. `ready_seconds`: how long it was ready; None: never."""
        if ready_seconds is not None:
            # One that was ready is not broken: something killed it, and that need not happen again.
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
    """Written by the supervisor's thread only. Times are monotonic."""

    service: Service
    reader: StatusReader
    backoff: Backoff
    child: Child | None = None
    """The running process, or the last one until the next starts."""
    ready_at: float | None = None
    """When this child was first seen to be ready."""
    address: str = ""
    """Of a router, from the first time it was ready."""
    start_at: float | None = None
    """When the next child is due."""
    returning: bool = False
    """Restarted, and its recovery has not been logged yet."""
    given_up: bool = False
    kill_at: float | None = None
    """It is draining for a restart; at this time it is killed."""
    restarted: Future[None] | None = None
    """Of the `restart` call in progress."""
    frozen: bool = False
    """It was killed because its loop stood still."""

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
        """Its address on the ring; empty before it is ready, and for routers."""
        return "" if self.service.role == "router" else self.reader.status.address

    def receives(self, peer: "Slot") -> bool:
        """Whether this router gets heartbeats of the process that now runs in the peer's slot."""
        return self.reader.status.peers.get(peer.name) == peer.reader.status.epoch

    def clear(self) -> None:
        self.ready_at = self.kill_at = None
        self.frozen = False
        # Otherwise the file of the last process would make the next one look ready.
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
            # The next process gets the same port, even if the first one chose it: clients know it by now.
            self.address, self.service = address, self.service.on_port(int(port))

    def stalled_seconds(self, now: float) -> float:
        """Since its event loop last turned; 0 before it is ready."""
        turned_at = self.reader.turned_at
        return 0.0 if turned_at is None else now - turned_at

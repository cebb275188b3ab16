"""The ranks of one engine on several machines, as one child: it ends with rank 0, and rank 0 ends with any other."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sluice.launch.child import TAIL_LINES
from sluice.launch.hosts.remote_child import RemoteChild, RemoteSeat, RemoteStatus
from sluice.launch.logs import LogLine, Observe
from sluice.launch.plan import Service
from sluice.launch.rank import Rank

# For rank 0 to notice by itself that another is lost, and to log why. While it loads it may not notice for minutes.
NOTICE_SECONDS = 5.0


class MeetingPoint:
    """Where the ranks of one run find each other: at a free port of rank 0's machine."""

    def __init__(self, seats: Sequence[RemoteSeat]) -> None:
        self._seats = seats
        self._found: tuple[str, int] | None = None
        self._lock = threading.Lock()

    def add_to(self, service: Service) -> Service:
        """Wait until every rank has a machine. Raises SeatAwayError, SeatLostError."""
        if service.rank is None:
            raise ValueError(f"{service.name} is no rank")
        with self._lock:
            if self._found is None:
                # All of them are asked: rank 0 must not start while another waits for its machine, or its time limit
                # for the others to connect would run meanwhile.
                addresses = [seat.call("free_address") for seat in self._seats]
                self._found = addresses[0]
        master, port = self._found
        return replace(service, rank=replace(service.rank, master=master, port=port))


class RankGroup:
    """A `Child`: what is said of it is said of rank 0, but for log lines, which come from all. Thread-safe."""

    def __init__(
        self,
        service: Service,
        ranks: Sequence[Rank],
        seats: Sequence[RemoteSeat],
        status: RemoteStatus,
        observe: Observe,
        ended: Callable[["RankGroup"], None],
    ) -> None:
        """`seats`: of the ranks, in order. `status` gets that of rank 0, which alone serves."""
        self.name = service.name
        self.role: str = service.role
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._observe = observe
        self._report_end = ended
        self._endings: list[str] = []
        """How ranks ended, as far as it was known when rank 0 had ended. Which of them was the cause is in the log."""
        self._over = False
        self._made = threading.Event()
        meeting = MeetingPoint(seats)
        self._ranks = [
            RemoteChild(
                _service_of(rank, service),
                seat,
                RemoteStatus() if rank.number else status,
                self._take_line,
                partial(self._on_end, rank.number),
                dict,
                meeting.add_to,
            )
            for rank, seat in zip(ranks, seats, strict=True)
        ]
        self._made.set()

    @property
    def pid(self) -> int:
        return self._ranks[0].pid

    @property
    def error(self) -> str:
        return next((each.error for each in self._ranks if each.error), "")

    @property
    def alive(self) -> bool:
        return self._ranks[0].alive

    @property
    def ending(self) -> str:
        return ", ".join(self._endings) if self._over else self._ranks[0].ending

    def terminate(self) -> None:
        # Ranks that have loaded leave this signal to rank 0; those that load end.
        for each in self._ranks:
            each.terminate()

    def kill(self) -> None:
        for each in self._ranks:
            each.kill()

    def wait(self, timeout: float) -> bool:
        return self._ranks[0].wait(timeout)

    def _take_line(self, line: LogLine) -> None:
        self.tail.append(line.text)
        self._observe(line)

    def _on_end(self, number: int, child: RemoteChild) -> None:
        """Called once by each rank."""
        # The first may end before the last has been made.
        self._made.wait()
        if self._over:
            return
        self._endings.append(f"rank {number} {child.ending}")
        if number == 0:
            self._over = True
            for other in self._ranks[1:]:
                other.kill()
            self._report_end(self)
        else:
            # Not waited for here: this may be the supervisor's thread.
            kill = threading.Timer(NOTICE_SECONDS, self._ranks[0].kill)
            kill.daemon = True
            kill.start()


def _service_of(rank: Rank, service: Service) -> Service:
    if rank.number == 0:
        return replace(service, rank=rank)
    # Only rank 0 listens: the others must not wait for its port to become free.
    return replace(service, rank=rank, arguments={**service.arguments, "metrics_port": None})

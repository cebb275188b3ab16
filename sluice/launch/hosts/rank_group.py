"""The ranks of one engine on several machines as one child. It ends with rank 0, which ends if any other rank ends."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sluice.launch.gpus import Rank
from sluice.launch.hosts.hosts import TAIL_LINES
from sluice.launch.hosts.remote_child import RemoteAgent, RemoteChild, RemoteStatus
from sluice.launch.logs import LogLine, Observe
from sluice.launch.plan import Service

NOTICE_SECONDS = 5.0
"""Time after the loss of another rank before rank 0 is killed.

It lets rank 0 detect the loss itself and log the reason. While rank 0 loads, it may not detect it for minutes.
"""


class MeetingPoint:
    """The address at which the ranks of one run find each other: a free port of rank 0's machine."""

    def __init__(self, agents: Sequence[RemoteAgent]) -> None:
        self._agents = agents
        self._address: tuple[str, int] | None = None
        self._lock = threading.Lock()

    def add_to(self, service: Service) -> Service:
        """The service with this address. Waits until every rank has a machine.

        Raises AgentUnavailableError, AgentLostError.
        """
        if service.rank is None:
            raise ValueError(f"{service.name} is not a rank")
        with self._lock:
            if self._address is None:
                # Wait for all machines: if rank 0 started earlier, its timeout for the other ranks to connect would
                # elapse while they wait for their machines.
                addresses = [agent.call("free_address") for agent in self._agents]
                self._address = addresses[0]
        master, port = self._address
        return replace(service, rank=replace(service.rank, master=master, port=port))


class RankGroup:
    """A `Child` whose state is that of rank 0, and whose log lines are those of all ranks. Thread-safe."""

    def __init__(
        self,
        service: Service,
        ranks: Sequence[Rank],
        agents: Sequence[RemoteAgent],
        status: RemoteStatus,
        observe: Observe,
        ended: Callable[["RankGroup"], None],
    ) -> None:
        """`agents`: those of the ranks, in order. `status` receives the status of rank 0, the only one that serves."""
        self.name = service.name
        self.role: str = service.role
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._observe = observe
        self._report_end = ended
        self._endings: list[str] = []
        """How ranks ended, as known when rank 0 ended. The log tells which of them was the cause."""
        self._ended = False
        self._created = threading.Event()
        meeting = MeetingPoint(agents)
        self._ranks = [
            RemoteChild(
                _service_of(rank, service),
                agent,
                RemoteStatus() if rank.number else status,
                self._on_line,
                partial(self._on_end, rank.number),
                dict,
                meeting.add_to,
            )
            for rank, agent in zip(ranks, agents, strict=True)
        ]
        self._created.set()

    @property
    def pid(self) -> int:
        return self._ranks[0].pid

    @property
    def error(self) -> str:
        return next((rank.error for rank in self._ranks if rank.error), "")

    @property
    def alive(self) -> bool:
        return self._ranks[0].alive

    @property
    def ending(self) -> str:
        return ", ".join(self._endings) if self._ended else self._ranks[0].ending

    def terminate(self) -> None:
        # Other ranks ignore this signal once they have loaded, and end with rank 0. Ranks that are loading end.
        for rank in self._ranks:
            rank.terminate()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def wait(self, timeout: float) -> bool:
        return self._ranks[0].wait(timeout)

    def _on_line(self, line: LogLine) -> None:
        self.tail.append(line.text)
        self._observe(line)

    def _on_end(self, number: int, child: RemoteChild) -> None:
        """Called once for each rank."""
        # The first rank may end before the last one has been created.
        self._created.wait()
        if self._ended:
            return
        self._endings.append(f"rank {number} {child.ending}")
        if number == 0:
            self._ended = True
            for other in self._ranks[1:]:
                other.kill()
            self._report_end(self)
        else:
            # A timer, because this may be the supervisor's thread, which must not wait.
            kill = threading.Timer(NOTICE_SECONDS, self._ranks[0].kill)
            kill.daemon = True
            kill.start()


def _service_of(rank: Rank, service: Service) -> Service:
    if rank.number == 0:
        return replace(service, rank=rank)
    # Only rank 0 listens on the metrics port, so the other ranks must not wait for it to become free.
    return replace(service, rank=rank, arguments={**service.arguments, "metrics_port": None})

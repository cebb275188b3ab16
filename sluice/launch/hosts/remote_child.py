"""A child on another machine: a thread asks its seat about it."""

import signal
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sluice.launch.child import TAIL_LINES
from sluice.launch.hosts.seat import Report
from sluice.launch.logs import Observe, launcher_line
from sluice.launch.plan import Service
from sluice.ring.keys import Role
from sluice.ring.process import START_FAILED
from sluice.telemetry.service_status import NO_VERSION, Version

REPORT_SECONDS = 0.25
# A service that has not started by then waits for room in the cluster, which is reported.
PLACE_SECONDS = 15.0


class SeatLostError(Exception):
    """The seat is gone and will not come back."""


class SeatAwayError(Exception):
    """The seat cannot be reached now, or is being made anew."""


class RemoteSeat(Protocol):
    """Calls the methods of a `Seat`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Wait for the answer. Raises SeatAwayError, SeatLostError."""

    def send(self, method: str, *arguments: Any) -> None:
        """Without waiting; nothing happens if the seat cannot be reached."""


class RemoteStatus:
    """A `StatusSource`: the latest status that the seat's child has brought."""

    def __init__(self) -> None:
        self._latest: tuple[Version, bytes] | None = None

    @property
    def version(self) -> Version:
        latest = self._latest
        return NO_VERSION if latest is None else latest[0]

    def put(self, latest: tuple[Version, bytes]) -> None:
        self._latest = latest

    def read(self, seen: Version) -> tuple[Version, bytes] | None:
        latest = self._latest
        return None if latest is None or latest[0] == seen else latest

    def reset(self) -> None:
        self._latest = None


class RemoteChild:
    """A `Child`. Thread-safe."""

    def __init__(
        self,
        service: Service,
        seat: RemoteSeat,
        status: RemoteStatus,
        observe: Observe,
        ended: Callable[["RemoteChild"], None],
        peers: Callable[[], Mapping[Role, tuple[str, ...]]],
        complete: Callable[[Service], Service] = lambda service: service,
    ) -> None:
        """`complete`: adds what is known only just before the start. It may wait and raise as `RemoteSeat.call`."""
        self.name = service.name
        self.role = service.role
        self.pid = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.error = ""
        self._service = service
        self._seat = seat
        self._status = status
        self._observe = observe
        self._report_end = ended
        self._peers = peers
        self._complete = complete
        self._run = uuid.uuid4().hex
        self._seen = 0
        self._how = ""
        self._over = threading.Event()
        self._ending = threading.Lock()
        if service.rank is None or service.rank.number == 0:
            notice = threading.Timer(PLACE_SECONDS, self._report_waiting)
            notice.daemon = True
            notice.start()
        threading.Thread(target=self._follow, name=f"reports of {self.name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    @property
    def ending(self) -> str:
        if self.alive:
            return "still runs"
        return self._how

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        return self._over.wait(max(timeout, 0))

    def _report_waiting(self) -> None:
        if self.alive and not self.pid:
            self._observe(launcher_line(self.name, "waiting_for_node", "warning", seconds=PLACE_SECONDS))

    def _signal(self, number: signal.Signals) -> None:
        self._seat.send("signal", self._run, number)
        if not self.pid:
            # Nothing to wait for: its seat has not been given a place, or is being made anew.
            self._end(f"was ended by {number.name} before it had started")

    def _follow(self) -> None:
        try:
            started = False
            while self.alive:
                try:
                    if not started:
                        self._seat.call("start", self._run, self._complete(self._service), self._peers())
                        started = True
                    report = self._seat.call("report", self._run, self._seen, self._status.version)
                except SeatAwayError:
                    self._over.wait(REPORT_SECONDS)
                    continue
                self._take(report)
                self._over.wait(REPORT_SECONDS)
        except SeatLostError as error:
            self._end(f"lost its actor: {error}")
        except Exception as error:  # noqa: BLE001 - whatever else went wrong there, such as a start that failed
            # Ray puts the traceback from there before it.
            self._end(f"failed in its actor: {(str(error).strip() or type(error).__name__).splitlines()[-1]}")
        # It may have been started after it had been given up.
        self._seat.send("signal", self._run, signal.SIGKILL)

    def _take(self, report: Report | None) -> None:
        if not self.alive:
            return
        if report is None:
            self._end("went with its actor, which was started again")
            return
        self.pid, self._seen = report.pid, report.seen
        if report.status is not None:
            self._status.put(report.status)
        for line in report.lines:
            self.tail.append(line.text)
            if line.event == START_FAILED:
                self.error = str(line.fields.get("error", ""))
            self._observe(line)
        if report.ending is not None:
            self._end(report.ending)

    def _end(self, how: str) -> None:
        with self._ending:
            if self._over.is_set():
                return
            self._how = how
            self._over.set()
        self._report_end(self)

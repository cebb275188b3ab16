"""A child on another machine. A thread polls the agent there for reports."""

import signal
import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from sluice.launch.hosts.agent import Report
from sluice.launch.hosts.hosts import TAIL_LINES, Peers
from sluice.launch.logs import Observe, launcher_line
from sluice.launch.plan import Service
from sluice.telemetry.service_status import NO_VERSION, Version

REPORT_SECONDS = 0.25
"""Interval between two reports."""
PLACEMENT_SECONDS = 15.0
"""Time after which a service that has not started is reported to be waiting for a node."""


class AgentLostError(Exception):
    """The agent is lost permanently."""


class AgentUnavailableError(Exception):
    """The agent cannot be reached at present, or is being restarted."""


class RemoteAgent(Protocol):
    """Calls the methods of an `Agent` on another machine."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and wait for its result. Raises AgentUnavailableError, AgentLostError."""

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting. Does nothing if the agent cannot be reached."""


class RemoteStatus:
    """A `StatusSource`: the latest status that the agent reported."""

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
        agent: RemoteAgent,
        status: RemoteStatus,
        observe: Observe,
        ended: Callable[["RemoteChild"], None],
        peers: Callable[[], Peers],
        complete: Callable[[Service], Service] = lambda service: service,
    ) -> None:
        """`complete`: adds to the service what is known only just before its start.

        `complete` may wait, and may raise the errors of `RemoteAgent.call`.
        """
        self.name = service.name
        self.role = service.role
        self.pid = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.error = ""
        self._service = service
        self._agent = agent
        self._status = status
        self._observe = observe
        self._report_end = ended
        self._peers = peers
        self._complete = complete
        self._run = uuid.uuid4().hex
        self._lines_seen = 0
        self._how = ""
        self._ended = threading.Event()
        self._ending = threading.Lock()
        if service.rank is None or service.rank.number == 0:
            notice = threading.Timer(PLACEMENT_SECONDS, self._report_waiting)
            notice.daemon = True
            notice.start()
        threading.Thread(target=self._follow, name=f"reports of {self.name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def ending(self) -> str:
        return "is still running" if self.alive else self._how

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        return self._ended.wait(max(timeout, 0))

    def _report_waiting(self) -> None:
        if self.alive and not self.pid:
            self._observe(launcher_line(self.name, "waiting_for_node", "warning", seconds=PLACEMENT_SECONDS))

    def _signal(self, number: signal.Signals) -> None:
        self._agent.send("signal", self._run, number)
        if not self.pid:
            # There is no process to wait for: the agent is waiting for a node, or is being restarted.
            self._end(f"was ended by {number.name} before it had started")

    def _follow(self) -> None:
        try:
            started = False
            while self.alive:
                try:
                    if not started:
                        self._agent.call("start", self._run, self._complete(self._service), self._peers())
                        started = True
                    report = self._agent.call("report", self._run, self._lines_seen, self._status.version)
                except AgentUnavailableError:
                    self._ended.wait(REPORT_SECONDS)
                    continue
                self._on_report(report)
                self._ended.wait(REPORT_SECONDS)
        except AgentLostError as error:
            self._end(f"lost its actor: {error}")
        except Exception as error:  # noqa: BLE001 - any error of the remote call, such as a failed start
            # Ray puts the remote traceback before the message.
            self._end(f"failed in its actor: {(str(error).strip() or type(error).__name__).splitlines()[-1]}")
        # The process may have started after it was already considered to have ended.
        self._agent.send("signal", self._run, signal.SIGKILL)

    def _on_report(self, report: Report | None) -> None:
        if not self.alive:
            return
        if report is None:
            self._end("was lost with its actor, which was restarted")
            return
        self.pid, self._lines_seen = report.pid, report.lines_seen
        if report.status is not None:
            self._status.put(report.status)
        for line in report.lines:
            self.tail.append(line.text)
            self.error = line.start_error or self.error
            self._observe(line)
        if report.ending is not None:
            self._end(report.ending)

    def _end(self, how: str) -> None:
        with self._ending:
            if self._ended.is_set():
                return
            self._how = how
            self._ended.set()
        self._report_end(self)

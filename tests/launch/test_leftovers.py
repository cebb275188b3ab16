"""When the hosts delete what a service's former processes have left. Hosts and children are fakes."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from sluice.launch import LogLine, Plan
from sluice.launch.logs import LAUNCHER, launcher_line
from sluice.launch.plan import services
from sluice.launch.supervisor import Supervisor
from sluice.telemetry.service_status import ServiceStatus, Version
from tests.fakes.processes import wait_until

PLAN = Plan("model", "name", engines=2, detokenizers=1, max_failed_starts=2)


class Status:
    """A service's report, which a test sets."""

    def __init__(self) -> None:
        self.version = 0
        self.content = b""

    def report(self, status: ServiceStatus) -> None:
        self.version, self.content = self.version + 1, msgspec.json.encode(status)

    def read(self, seen: Version) -> tuple[Version, bytes] | None:
        version = (self.version, 1)
        return (version, self.content) if self.content and version != seen else None

    def reset(self) -> None:
        self.content = b""


class FakeChild:
    """A process that ends when a test says so."""

    def __init__(self, name: str, ended: Callable[["FakeChild"], None]) -> None:
        self.name = name
        self.pid = 1
        self.alive = True
        self.error = ""
        self.ending = "ended with code 1"
        self.tail: deque[str] = deque()
        self._ended = ended

    def end(self) -> None:
        self.alive = False
        self._ended(self)


class FakeHosts:
    """Hosts that record what is to be deleted."""

    def __init__(self) -> None:
        self.statuses = {each.name: Status() for each in services(PLAN, Path("/x"))}
        self.children: dict[str, FakeChild] = {}
        self.started = 0
        self.discarded: list[str] = []
        self.remarks = [launcher_line(LAUNCHER, "remark", "info")]

    def status(self, name: str) -> Status:
        return self.statuses[name]

    def start(self, service, observe, ended) -> FakeChild:
        self.children[service.name] = FakeChild(service.name, ended)
        self.started += 1
        return self.children[service.name]

    def discard(self, name: str) -> None:
        self.discarded.append(name)

    def announce(self, peers) -> None:
        """Not needed here."""

    def serve(self, *names: str) -> None:
        """Let these services report that they are ready, and every router that it is connected to them."""
        for name in names:
            peers = dict.fromkeys(self.statuses, 0) if name == "router" else {}
            self.statuses[name].report(ServiceStatus("ready", f"ipc:///x/{name}", peers=peers))


class Watched:
    """A supervisor whose services all serve."""

    def __init__(self) -> None:
        self.hosts = FakeHosts()
        self.lines: list[LogLine] = []
        self.supervisor = Supervisor(services(PLAN, Path("/x")), PLAN, self.hosts, self.lines.append)
        self.supervisor.start()
        assert wait_until(lambda: self.hosts.started == 4)
        self.hosts.serve(*self.hosts.statuses)
        assert wait_until(self.supervisor.up.is_set)
        self.hosts.discarded.clear()

    def end(self, name: str) -> None:
        """End the service's process, and wait until the supervisor has noticed."""
        noticed = len(self.exits)
        self.hosts.children[name].end()
        assert wait_until(lambda: len(self.exits) > noticed)

    @property
    def exits(self) -> list[LogLine]:
        return [line for line in self.lines if line.event == "service_exited"]

    def await_start(self, number: int) -> None:
        assert wait_until(lambda: self.hosts.started == number)


@pytest.fixture
def ring() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.supervisor.close()


def test_a_service_that_served_keeps_its_files_until_its_next_process_serves(ring: Watched) -> None:
    ring.end("engine-1")
    ring.await_start(5)
    assert ring.hosts.discarded == []
    ring.hosts.serve("engine-1")
    assert wait_until(lambda: ring.hosts.discarded == ["engine-1"])


def test_a_failed_start_and_a_service_given_up_leave_no_files(ring: Watched) -> None:
    ring.end("engine-1")
    ring.await_start(5)
    ring.end("engine-1")
    assert wait_until(lambda: ring.hosts.discarded == ["engine-1"])
    ring.await_start(6)
    ring.end("engine-1")
    assert ring.exits[-1].fields["given_up"]
    assert wait_until(lambda: ring.hosts.discarded == ["engine-1"] * 2)


def test_a_restart_on_request_keeps_the_files(ring: Watched) -> None:
    child = ring.hosts.children["engine-1"]
    child.terminate = child.end  # type: ignore[attr-defined]
    ring.supervisor.restart("engine-1")
    ring.await_start(5)
    assert ring.hosts.discarded == []


def test_what_the_hosts_have_decided_is_logged_first(ring: Watched) -> None:
    assert ring.lines[0].event == "remark"

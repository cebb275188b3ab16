"""A service of a remote agent as its supervisor sees it, with stand-in programs as services and without Ray."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from sluice.launch import Child, LogLine
from sluice.launch.hosts.agent import Agent
from sluice.launch.hosts.remote_child import RemoteChild, RemoteStatus
from sluice.launch.plan import Service
from sluice.settings.services import DetokenizerSettings, RouterSettings
from sluice.telemetry.service_status import NO_VERSION, StatusReader
from tests.fakes.processes import LIMIT, is_alive, wait_until
from tests.fakes.remote_agent import FakeRemoteAgent

pytestmark = pytest.mark.process

PEERS = {"engine": ("tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"), "detok": ("tcp://10.0.0.3:7000",)}
KEYS = {"secret/router.key": b"secret", "public/engine.key": b"public"}


class Watched:
    """A child of a remote agent, and what it reported."""

    def __init__(self, agent: FakeRemoteAgent, service: Service) -> None:
        self.lines: list[LogLine] = []
        self.ends: list[Child] = []
        self.over = threading.Event()
        status = RemoteStatus()
        self.reader = StatusReader(status)
        self.child = RemoteChild(service, agent, status, self.lines.append, self._end, lambda: PEERS)

    def _end(self, child: Child) -> None:
        self.ends.append(child)
        self.over.set()

    @property
    def ready(self) -> bool:
        self.reader.poll(1.0)
        return self.reader.status.state == "ready"


@pytest.fixture
def service(tmp_path, fake):
    arguments = {"id": "detok-0", "listen": "ipc://nowhere", "drain_timeout": 1.0}
    return Service("detok-0", DetokenizerSettings, arguments, fake["python"])


@pytest.fixture
def agent(monkeypatch):
    # The stand-in needs an inbox with a path, to which it writes.
    monkeypatch.setattr(Agent, "_localize", lambda self, service: _with_listen(service, self._folder.path / "inbox"))
    # Children die with the thread that started them, which here ends with the reports about its child.
    monkeypatch.setattr("sluice.launch.hosts.process.PARENT_VARIABLE", "UNUSED")
    remote = FakeRemoteAgent()
    yield remote
    remote.agent.close()


def _with_listen(service: Service, path: Path) -> Service:
    flags = {**service.arguments, "listen": f"ipc://{path}"}
    return Service(service.name, service.kind, flags, service.python)


def test_a_service_starts_reports_and_ends(agent, service):
    watched = Watched(agent, service)
    assert wait_until(lambda: watched.ready)
    assert is_alive(watched.child.pid)
    assert wait_until(lambda: [line.event for line in watched.lines] == ["ready"])
    watched.child.terminate()
    assert watched.child.wait(LIMIT)
    assert watched.child.ending == "ended with code 0"
    assert watched.ends == [watched.child]
    assert not watched.child.alive


def test_a_failed_start_is_reported_with_its_reason(agent, service, tmp_path):
    (tmp_path / "detok-0.do").write_text("die")
    watched = Watched(agent, service)
    assert watched.over.wait(LIMIT)
    assert watched.child.ending == "ended with code 3"
    assert watched.child.tail[-1] == "Traceback: it broke"


def test_a_service_survives_while_its_agent_is_unavailable(agent, service):
    agent.unavailable = True
    watched = Watched(agent, service)
    assert not watched.over.wait(0.6)
    agent.unavailable = False
    assert wait_until(lambda: watched.ready)
    agent.unavailable = True
    assert not watched.over.wait(0.6)
    agent.unavailable = False
    assert not watched.over.wait(0.6)
    watched.child.kill()
    assert watched.child.wait(LIMIT)
    assert watched.child.ending == "was killed by SIGKILL"


def test_a_service_ends_if_its_agent_is_restarted_and_can_be_started_again(agent, service):
    first = Watched(agent, service)
    assert wait_until(lambda: first.ready)
    agent.restart()
    assert first.over.wait(LIMIT)
    assert first.child.ending == "was lost with its actor, which was restarted"
    second = Watched(agent, service)
    assert wait_until(lambda: second.ready)
    assert len(first.ends) == 1


def test_a_service_ends_if_its_agent_is_lost(agent, service):
    watched = Watched(agent, service)
    assert wait_until(lambda: watched.ready)
    agent.lost = True
    assert watched.over.wait(LIMIT)
    assert watched.child.ending == "lost its actor: the actor is dead"


def test_a_service_that_waits_for_a_node_can_be_killed(agent, service):
    agent.unavailable = True
    watched = Watched(agent, service)
    watched.child.kill()
    assert watched.child.wait(LIMIT)
    assert watched.child.ending == "was ended by SIGKILL before it had started"


def test_a_service_that_waits_for_a_node_is_reported(agent, service, monkeypatch):
    monkeypatch.setattr("sluice.launch.hosts.remote_child.PLACEMENT_SECONDS", 0.1)
    agent.unavailable = True
    watched = Watched(agent, service)
    assert wait_until(lambda: [line.event for line in watched.lines] == ["waiting_for_node"])
    watched.child.kill()


def test_start_waits_for_a_port_that_a_former_process_still_uses(tmp_path):
    program = tmp_path / "nothing.py"
    program.touch()
    agent = Agent("127.0.0.1", {})
    with socket.create_server(("127.0.0.1", 0)) as former:
        arguments = {"host": "127.0.0.1", "port": former.getsockname()[1], "drain_timeout": 60.0}
        service = Service("router-0", RouterSettings, arguments, (os.sys.executable, str(program)))
        starting = threading.Thread(target=agent.start, args=("run", service, {}))
        starting.start()
        starting.join(0.5)
        assert starting.is_alive()
        assert agent.report("run", 0, NO_VERSION) is None
    starting.join(LIMIT)
    try:
        assert agent.report("run", 0, NO_VERSION) is not None
    finally:
        agent.close()


def test_a_second_start_replaces_the_process(agent, service, tmp_path):
    agent.agent.start("one", service, PEERS)
    first = agent.agent.report("one", 0, NO_VERSION)
    agent.agent.start("two", service, PEERS)
    assert not is_alive(first.pid)
    assert agent.agent.report("one", 0, NO_VERSION) is None
    second = agent.agent.report("two", 0, NO_VERSION)
    # A repeated call, as after a lost answer, does not start another process.
    agent.agent.start("two", service, PEERS)
    assert agent.agent.report("two", 0, NO_VERSION).pid == second.pid
    agent.agent.signal("one", signal.SIGKILL)
    assert is_alive(second.pid)


def test_a_router_reads_its_peers_from_files_and_listens_at_its_node(tmp_path):
    program = tmp_path / "flags.py"
    program.write_text("import json, sys; print(json.dumps(sys.argv))")
    agent = Agent("127.0.0.1", KEYS)
    try:
        arguments = {"listen": "", "engines": (), "detokenizers": (), "host": "0.0.0.0", "keys": None}
        python = (os.sys.executable, str(program))
        agent.start("run", Service("router-0", RouterSettings, arguments, python), PEERS)
        assert wait_until(lambda: agent.report("run", 0, NO_VERSION).ending is not None)
        argv = json.loads(agent.report("run", 0, NO_VERSION).lines[0].text)
        flags = dict(zip(argv[3::2], argv[4::2], strict=True))
        assert (flags["--listen"], flags["--host"]) == ("tcp://127.0.0.1:*", "127.0.0.1")
        engines = Path(flags["--engines"].removeprefix("file://"))
        assert engines.read_text().split() == list(PEERS["engine"])
        assert Path(flags["--detokenizers"].removeprefix("file://")).read_text().split() == list(PEERS["detok"])
        secret = Path(flags["--keys"]) / "secret" / "router.key"
        assert (secret.read_bytes(), secret.stat().st_mode & 0o777) == (b"secret", 0o600)
        agent.announce({"engine": ("tcp://10.0.0.9:1",)})
        assert engines.read_text() == "tcp://10.0.0.9:1\n"
    finally:
        agent.close()
    assert not secret.exists()


def test_an_address_of_ipv6_has_brackets(service):
    agent = Agent("fd00::7", {})
    try:
        assert "tcp://[fd00::7]:*" in agent._localize(service).command
    finally:
        agent.close()


def test_lines_are_reported_once(tmp_path):
    program = tmp_path / "lines.py"
    program.write_text("for i in range(3): print(i)")
    agent = Agent("127.0.0.1", {})
    try:
        agent.start("run", Service("detok-0", DetokenizerSettings, {}, (os.sys.executable, str(program))), {})
        assert wait_until(lambda: agent.report("run", 0, NO_VERSION).ending is not None)
        report = agent.report("run", 1, NO_VERSION)
        assert ([line.text for line in report.lines], report.lines_seen) == (["1", "2"], 3)
        assert agent.report("run", 3, NO_VERSION).lines == ()
    finally:
        agent.close()

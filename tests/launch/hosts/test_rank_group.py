"""Ranks of several agents as one child, with a stand-in program for each rank and without Ray."""

import json
import os
import signal
import sys
import threading

import pytest

from sluice.launch import LogLine
from sluice.launch.gpus import ranks_of
from sluice.launch.hosts.agent import Agent
from sluice.launch.hosts.rank_group import RankGroup
from sluice.launch.hosts.remote_child import RemoteStatus
from sluice.launch.plan import Service
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import NO_VERSION
from tests.fakes.processes import LIMIT, is_alive, wait_until
from tests.fakes.remote_agent import FakeRemoteAgent

pytestmark = pytest.mark.process

RANKS = 3
PLAYED = """
import json, os, signal, sys
rank = int(os.environ["RANK"])
print(json.dumps({"event": "started", "rank": rank, "flags": sys.argv, "environment": dict(os.environ)}), flush=True)
if rank:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
"""


class Watched:
    """A group, and what it reported."""

    def __init__(self, agents: list[FakeRemoteAgent], service: Service) -> None:
        self.started: dict[int, dict] = {}
        self.over = threading.Event()
        self.ends = 0
        self.group = RankGroup(service, ranks_of(RANKS, 1), agents, RemoteStatus(), self._on_line, self._end)

    def _on_line(self, line: LogLine) -> None:
        if line.event == "started":
            self.started[line.fields["rank"]] = line.fields

    def _end(self, group: RankGroup) -> None:
        self.ends += 1
        self.over.set()

    @property
    def complete(self) -> bool:
        return len(self.started) == RANKS


@pytest.fixture
def service(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(PLAYED)
    return Service("engine-0", EngineSettings, {"metrics_port": 0, "keys": None}, (sys.executable, str(program)))


@pytest.fixture
def agents():
    agents = [FakeRemoteAgent() for _ in range(RANKS)]
    yield agents
    for remote in agents:
        remote.agent.close()


@pytest.fixture
def notice(monkeypatch):
    monkeypatch.setattr("sluice.launch.hosts.rank_group.NOTICE_SECONDS", 0.2)


def pids(agents: list[FakeRemoteAgent]) -> list[int]:
    return [remote.agent._child.pid for remote in agents]


def test_all_ranks_meet_at_an_address_of_rank_0(agents, service):
    watched = Watched(agents, service)
    assert wait_until(lambda: watched.complete)
    environments = [watched.started[rank]["environment"] for rank in range(RANKS)]
    assert [environment["RANK"] for environment in environments] == ["0", "1", "2"]
    assert {environment["WORLD_SIZE"] for environment in environments} == {"3"}
    assert {environment["MASTER_ADDR"] for environment in environments} == {"127.0.0.1"}
    (port,) = {environment["MASTER_PORT"] for environment in environments}
    assert int(port) > 0
    # Two processes on one machine cannot use the same metrics port.
    assert ["--metrics-port" in watched.started[rank]["flags"] for rank in range(RANKS)] == [True, False, False]
    watched.group.kill()
    assert watched.over.wait(LIMIT)


def test_no_rank_starts_before_all_have_a_machine(agents, service):
    agents[2].unavailable = True
    watched = Watched(agents, service)
    assert not watched.over.wait(0.6)
    assert watched.group.pid == 0
    assert all(remote.agent._child is None for remote in agents)
    agents[2].unavailable = False
    assert wait_until(lambda: watched.complete)
    watched.group.kill()
    assert watched.over.wait(LIMIT)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_ranks_end_if_one_ends(agents, service, notice, victim):
    watched = Watched(agents, service)
    assert wait_until(lambda: watched.complete and watched.group.pid)
    processes = pids(agents)
    os.kill(processes[victim], signal.SIGKILL)
    assert watched.over.wait(LIMIT)
    assert wait_until(lambda: not any(map(is_alive, processes)))
    assert f"rank {victim} was killed by SIGKILL" in watched.group.ending
    assert not watched.group.alive
    assert watched.ends == 1


def test_all_ranks_end_if_an_agent_is_restarted_and_can_be_started_again(agents, service, notice):
    first = Watched(agents, service)
    assert wait_until(lambda: first.complete and first.group.pid)
    agents[1].restart()
    assert first.over.wait(LIMIT)
    assert "rank 1 was lost with its actor, which was restarted" in first.group.ending
    second = Watched(agents, service)
    assert wait_until(lambda: second.complete)
    ports = {run.started[0]["environment"]["MASTER_PORT"] for run in (first, second)}
    assert len(ports) == 2
    second.group.kill()
    assert second.over.wait(LIMIT)


def test_a_group_that_waits_for_a_machine_can_be_stopped_immediately(agents, service):
    agents[1].unavailable = True
    watched = Watched(agents, service)
    watched.group.terminate()
    assert watched.group.wait(LIMIT)
    assert "rank 0 was ended by SIGTERM before it had started" in watched.group.ending
    assert watched.ends == 1


def test_rank_0_is_refused_if_it_moved_to_another_machine(service):
    agent = Agent("127.0.0.1", {})
    moved = ranks_of(RANKS, 1)[0]
    try:
        with pytest.raises(OSError, match=r"rank 0 moved to 127\.0\.0\.1"):
            agent.start("run", Service(service.name, service.kind, {}, service.python, rank=moved), {})
        assert agent.report("run", 0, NO_VERSION) is None
    finally:
        agent.close()


def test_the_tail_has_lines_of_all_ranks(agents, service):
    watched = Watched(agents, service)
    assert wait_until(lambda: watched.complete)
    assert sorted(json.loads(line)["rank"] for line in watched.group.tail) == [0, 1, 2]
    watched.group.kill()
    assert watched.over.wait(LIMIT)

"""Ranks behind several seats as one child, with a stand-in as each rank and no Ray."""

import json
import os
import signal
import sys
import threading

import pytest

from sluice.launch import LogLine
from sluice.launch.hosts.rank_group import RankGroup
from sluice.launch.hosts.remote_child import RemoteStatus
from sluice.launch.hosts.seat import Seat
from sluice.launch.plan import Service
from sluice.launch.rank import ranks_of
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import NO_VERSION
from tests.fakes.processes import LIMIT, is_alive, wait_until
from tests.fakes.remote_seat import FakeRemoteSeat

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
    """A group, and what it told."""

    def __init__(self, seats: list[FakeRemoteSeat], service: Service) -> None:
        self.started: dict[int, dict] = {}
        self.over = threading.Event()
        self.ends = 0
        self.group = RankGroup(service, ranks_of(RANKS, 1), seats, RemoteStatus(), self._take, self._end)

    def _take(self, line: LogLine) -> None:
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
def seats():
    found = [FakeRemoteSeat() for _ in range(RANKS)]
    yield found
    for each in found:
        each.seat.close()


@pytest.fixture
def notice(monkeypatch):
    monkeypatch.setattr("sluice.launch.hosts.rank_group.NOTICE_SECONDS", 0.2)


def pids(seats: list[FakeRemoteSeat]) -> list[int]:
    return [each.seat._child.pid for each in seats]


def test_all_ranks_meet_at_an_address_of_rank_0(seats, service):
    watched = Watched(seats, service)
    assert wait_until(lambda: watched.complete)
    found = [watched.started[rank]["environment"] for rank in range(RANKS)]
    assert [each["RANK"] for each in found] == ["0", "1", "2"]
    assert {each["WORLD_SIZE"] for each in found} == {"3"}
    assert {each["MASTER_ADDR"] for each in found} == {"127.0.0.1"}
    (port,) = {each["MASTER_PORT"] for each in found}
    assert int(port) > 0
    # Two processes of one machine cannot have the same port of metrics.
    assert ["--metrics-port" in watched.started[rank]["flags"] for rank in range(RANKS)] == [True, False, False]
    watched.group.kill()
    assert watched.over.wait(LIMIT)


def test_no_rank_starts_before_all_have_a_machine(seats, service):
    seats[2].away = True
    watched = Watched(seats, service)
    assert not watched.over.wait(0.6)
    assert watched.group.pid == 0
    assert all(each.seat._child is None for each in seats)
    seats[2].away = False
    assert wait_until(lambda: watched.complete)
    watched.group.kill()
    assert watched.over.wait(LIMIT)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_rank_s_end_is_the_end_of_all(seats, service, notice, victim):
    watched = Watched(seats, service)
    assert wait_until(lambda: watched.complete and watched.group.pid)
    processes = pids(seats)
    os.kill(processes[victim], signal.SIGKILL)
    assert watched.over.wait(LIMIT)
    assert wait_until(lambda: not any(map(is_alive, processes)))
    assert f"rank {victim} was killed by SIGKILL" in watched.group.ending
    assert not watched.group.alive
    assert watched.ends == 1


def test_a_rank_whose_seat_is_made_anew_ends_all_and_a_second_run_starts(seats, service, notice):
    first = Watched(seats, service)
    assert wait_until(lambda: first.complete and first.group.pid)
    seats[1].restart()
    assert first.over.wait(LIMIT)
    assert "rank 1 went with its actor, which was started again" in first.group.ending
    second = Watched(seats, service)
    assert wait_until(lambda: second.complete)
    ports = {run.started[0]["environment"]["MASTER_PORT"] for run in (first, second)}
    assert len(ports) == 2
    second.group.kill()
    assert second.over.wait(LIMIT)


def test_one_that_is_stopped_while_it_waits_for_a_machine_ends_at_once(seats, service):
    seats[1].away = True
    watched = Watched(seats, service)
    watched.group.terminate()
    assert watched.group.wait(LIMIT)
    assert "rank 0 was ended by SIGTERM before it had started" in watched.group.ending
    assert watched.ends == 1


def test_rank_0_on_another_machine_than_the_others_know_is_refused(service):
    seat = Seat("127.0.0.1", {})
    moved = ranks_of(RANKS, 1)[0]
    try:
        with pytest.raises(OSError, match=r"rank 0 has moved to 127\.0\.0\.1"):
            seat.start("run", Service(service.name, service.kind, {}, service.python, rank=moved), {})
        assert seat.report("run", 0, NO_VERSION) is None
    finally:
        seat.close()


def test_lines_of_all_ranks_are_kept(seats, service):
    watched = Watched(seats, service)
    assert wait_until(lambda: watched.complete)
    assert sorted(json.loads(line)["rank"] for line in watched.group.tail) == [0, 1, 2]
    watched.group.kill()
    assert watched.over.wait(LIMIT)

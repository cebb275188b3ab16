"""Services that exit while the ring serves are restarted at their address. Stand-ins are used as services."""

import os
import signal
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.launch import LogLine, Ring, RingError
from sluice.launch.logs import LAUNCHER
from tests.fakes.processes import LIMIT, is_alive, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

SEVERAL_STARTS = 4 * LIMIT
"""Seconds for services to start one after the other on a busy machine."""

SERVING = health_pb2.HealthCheckResponse.SERVING


class LauncherLines(list[LogLine]):
    """The observed lines that the launcher wrote about services."""

    def __call__(self, line: LogLine) -> None:
        if line.fields.get("service") == LAUNCHER != line.child:
            self.append(line)

    def wait(self, count: int) -> list[tuple[str, str]]:
        assert wait_until(lambda: len(self) >= count, SEVERAL_STARTS)
        return [(line.child, line.event) for line in self]


@pytest.fixture
def events() -> LauncherLines:
    return LauncherLines()


def serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT, wait_for_ready=True)
    return answer.status == SERVING


@pytest.mark.parametrize(
    "name", ["router", *(pytest.param(name, marks=pytest.mark.long) for name in ("engine-0", "detok-1"))]
)
def test_a_service_that_exits_is_restarted_at_its_address(fake, events, notes, name) -> None:
    with Ring(observe=events, **fake) as ring:
        address, pid = ring.address, ring.pids[name]
        before = notes(name)["flags"]
        os.kill(pid, signal.SIGKILL)
        assert events.wait(2) == [(name, "service_exited"), (name, "service_recovered")]
        assert events[0].fields | {"pid": pid, "how": "was killed by SIGKILL", "restart_in": 0.2} == events[0].fields
        assert ring.pids[name] == events[1].fields["pid"] != pid
        assert ring.address == address
        assert notes(name)["flags"]["--listen"] == before["--listen"]
        assert serves(address)
        assert ring.missing == []
        pids = list(ring.pids.values())
    assert len(events) == 2
    assert not any(map(is_alive, pids))


@pytest.mark.long
def test_a_service_that_fails_to_start_repeatedly_is_given_up(fake, events, tmp_path) -> None:
    with Ring(engines=2, max_failed_starts=3, observe=events, **fake) as ring:
        (tmp_path / "engine-1.do").write_text("die")
        os.kill(ring.pids["engine-1"], signal.SIGKILL)
        assert events.wait(4) == 4 * [("engine-1", "service_exited")]
        assert [line.fields.get("restart_in") for line in events] == [0.2, 0.4, 0.8, None]
        assert events[3].fields["how"] == "ended with code 3"
        assert ring.missing == []
        assert not ring.children["engine-1"].alive

        # It can be restarted on request.
        with pytest.raises(RingError, match="engine-1 ended with code 3") as caught:
            ring.restart("engine-1")
        assert caught.value.tail == ("Traceback: it broke",)
        (tmp_path / "engine-1.do").unlink()
        ring.restart("engine-1")
        assert ring.children["engine-1"].alive


def test_a_role_without_services_is_missing(fake, tmp_path) -> None:
    with Ring(max_failed_starts=1, **fake) as ring:
        (tmp_path / "engine-0.do").write_text("die")
        os.kill(ring.pids["engine-0"], signal.SIGKILL)
        assert ring.watch() == ["engine"]


def test_no_service_is_started_while_stopping(fake, events, tmp_path) -> None:
    with Ring(observe=events, **fake) as ring:
        started = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in ring.pids}
        ring.stop()
        assert wait_until(lambda: not any(map(is_alive, ring.pids.values())))
        time.sleep(0.5)
        assert {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in ring.pids} == started
    assert events == []


@pytest.mark.long
def test_a_rolling_restart(fake, events, tmp_path) -> None:
    with Ring(routers=2, engines=2, observe=events, **fake) as ring:
        addresses, pids = ring.addresses, ring.pids
        ring.restart_all()
        assert ring.addresses == addresses
        assert all(map(serves, addresses))
        assert events.wait(6) == [(name, "service_recovered") for name in pids]
        assert not set(pids.values()) & set(ring.pids.values())
        assert not any(map(is_alive, pids.values()))
        assert all((tmp_path / f"{name}.ended").exists() for name in pids)
        with pytest.raises(KeyError):
            ring.restart("engine-7")


def test_a_service_that_does_not_exit_in_time_is_killed_and_replaced(fake, events, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sluice.launch.supervisor.KILL_AFTER_SECONDS", 0.3)
    (tmp_path / "detok-0.do").write_text("deaf")
    with Ring(drain_timeout=0, observe=events, **fake) as ring:
        pid = ring.pids["detok-0"]
        (tmp_path / "detok-0.do").unlink()
        ring.restart("detok-0")
        assert not is_alive(pid)
        assert [line.event for line in events] == ["service_recovered"]


def test_a_restart_in_progress_fails_when_the_ring_stops(fake, tmp_path) -> None:
    caught: list[RingError] = []

    def restart() -> None:
        with pytest.raises(RingError) as error:
            ring.restart("engine-0")
        caught.append(error.value)

    with Ring(drain_timeout=0, **fake) as ring:
        (tmp_path / "engine-0.do").write_text("hang")
        waiting = threading.Thread(target=restart)
        waiting.start()
        pid = ring.pids["engine-0"]
        assert wait_until(lambda: ring.pids["engine-0"] != pid)
        with pytest.raises(RingError, match="is already being restarted"):
            ring.restart("engine-0")
    waiting.join(LIMIT)
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["router", pytest.param("detok-0", marks=pytest.mark.long)])
def test_a_frozen_service_is_killed_and_restarted(fake, events, name) -> None:
    # Longer than the other services may be delayed on a busy machine.
    with Ring(freeze_timeout=6, observe=events, **fake) as ring:
        pid = ring.pids[name]
        os.kill(pid, signal.SIGSTOP)
        assert events.wait(2) == [(name, "service_exited"), (name, "service_recovered")]
        assert events[0].fields["how"] == "was frozen for 6 s and was killed"
        assert not is_alive(pid)
        time.sleep(7)
        assert len(events) == 2


def test_several_routers_have_all_peers_and_consecutive_ports(fake, notes) -> None:
    with Ring(routers=2, engines=2, detokenizers=1, **fake) as ring:
        assert list(ring.pids) == ["engine-0", "engine-1", "detok-0", "router-0", "router-1"]
        assert len(set(ring.addresses)) == 2
        assert ring.address == ring.addresses[0]
        assert all(map(serves, ring.addresses))
        for option in ("--engines", "--detokenizers"):
            assert notes("router-0")["flags"][option] == notes("router-1")["flags"][option]
        assert notes("router-0")["flags"]["--listen"] != notes("router-1")["flags"]["--listen"]

"""Liveness, readiness, and the server that tells them."""

import socket
import urllib.error
import urllib.request
from types import SimpleNamespace as Having

import pytest
from prometheus_client import CollectorRegistry

from sluice.settings.process import Monitoring
from sluice.telemetry.metrics import gauge
from sluice.telemetry.pages import Page
from sluice.telemetry.server import MAX_CONNECTIONS, Health, MetricsPort, StatusServer
from sluice.telemetry.service_status import ProgressBeacon
from sluice.telemetry.status_report import ServiceReport
from tests.fakes.clock import Clock
from tests.fakes.ports import free_ports
from tests.fakes.processes import wait_until


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return Health(ProgressBeacon(clock), live_stall=120, ready_stall=30, unready=lambda: None)


@pytest.fixture
def serve():
    started = []

    def start(health: Health, host: str = "127.0.0.1") -> StatusServer:
        started.append(StatusServer(Page(CollectorRegistry(), health), host, 0))
        return started[-1]

    yield start
    for server in started:
        server.close()


def ask(server: StatusServer, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{server.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_long_step_is_not_ready_and_alive_until_it_is_too_long(clock, health):
    assert (health.dead(), health.not_ready()) == (None, None)
    clock.now += 31
    assert health.dead() is None
    assert health.not_ready() == "the loop has not turned for 31.0 s"
    clock.now += 90
    assert health.dead() == "the loop has not turned for 121.0 s"
    health.beacon.touch()
    assert (health.dead(), health.not_ready()) == (None, None)


def test_a_loop_that_turns_without_getting_on_is_not_ready(clock, health):
    for _ in range(31):
        clock.now += 1
        health.beacon.touch(moving=False)
    assert health.dead() is None
    assert health.not_ready() == "there is work, and nothing has moved for 31.0 s"
    health.beacon.touch()
    assert health.not_ready() is None


def test_what_a_service_knows_itself(clock):
    assert Health(ProgressBeacon(clock), 120, 30, lambda: "it is draining").not_ready() == "it is draining"


def test_over_http(serve, clock, health):
    server = serve(health)
    assert ask(server, "/livez") == ask(server, "/readyz") == (200, "ok\n")
    clock.now += 31
    assert ask(server, "/livez") == (200, "ok\n")
    assert ask(server, "/readyz?verbose") == (503, "the loop has not turned for 31.0 s\n")
    clock.now += 100
    assert ask(server, "/livez") == (503, "the loop has not turned for 131.0 s\n")
    assert ask(server, "/metrics") == (200, "")
    assert ask(server, "/elsewhere") == (404, "there are /, /status.json, /metrics, /livez and /readyz\n")


def test_over_ipv6(serve, health):
    try:
        server = serve(health, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert ask(server, "/livez", "[::1]") == (200, "ok\n")


def test_a_port_that_is_taken_is_told(health):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"cannot serve metrics and health on 127\.0\.0\.1 port"),
    ):
        StatusServer(Page(CollectorRegistry(), health), "127.0.0.1", taken.getsockname()[1])


def test_silent_and_broken_connections_are_bounded_and_go_away(serve, health, monkeypatch):
    monkeypatch.setattr("sluice.telemetry.server.REQUEST_SECONDS", 1.0)
    server = serve(health)
    address = ("127.0.0.1", server.port)
    silent = [socket.create_connection(address, timeout=30) for _ in range(MAX_CONNECTIONS + 8)]
    try:
        # Those beyond the bound are closed, as are those that say nothing for long.
        assert all(each.recv(1) == b"" for each in silent)
    finally:
        for each in silent:
            each.close()
    for noise in (b"\x00\xff" * 500 + b"\r\n\r\n", b"GET /livez HTTP/9.9\r\n\r\n", b"POST"):
        with socket.create_connection(address, timeout=30) as broken:
            broken.sendall(noise)
    assert wait_until(lambda: is_live(server))


def is_live(server: StatusServer) -> bool:
    """False also where its short limit cut the connection off: this process may have stood still for longer."""
    try:
        return ask(server, "/livez")[0] == 200
    except OSError:
        return False


def test_a_service_that_loads_is_alive_and_says_how_far_it_is():
    port = free_ports(1)
    opened = MetricsPort(
        Monitoring(metrics_port=port),
        lambda startup: [gauge("loaded", "Part of the weights.", startup.loaded)],
    )
    try:
        server = Having(port=port)
        assert ask(server, "/livez") == (200, "ok\n")
        assert ask(server, "/readyz") == (503, "starting\n")
        opened.startup.report("loading", 43, 100)
        assert ask(server, "/readyz") == (503, "loading 43 %\n")
        assert "loaded 0.43" in ask(server, "/metrics")[1]
        opened.startup.report("capturing", 1, 2)
        assert ask(server, "/readyz") == (503, "capturing 50 %\n")
        opened.show(ProgressBeacon(), lambda: [gauge("steps", "Steps.", 7)], lambda: None, lambda: ServiceReport("x"))
        assert ask(server, "/readyz") == (200, "ok\n")
        scraped = ask(server, "/metrics")[1]
        assert "loaded 1.0" in scraped
        assert "steps 7.0" in scraped
    finally:
        opened.close()


def test_without_a_metrics_port_there_is_no_server():
    opened = MetricsPort(Monitoring())
    opened.show(ProgressBeacon(), list, lambda: None, lambda: ServiceReport(""))
    opened.close()

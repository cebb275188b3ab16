"""Liveness, readiness, and the server that answers the probes."""

import socket
import urllib.error
import urllib.request
from types import SimpleNamespace as Stub

import pytest
from prometheus_client import CollectorRegistry

from sluice.settings.gateway import GatewaySettings
from sluice.telemetry.metrics import gauge
from sluice.telemetry.pages import Page
from sluice.telemetry.probes import Health
from sluice.telemetry.server import MAX_CONNECTIONS, MetricsPort, StatusServer
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


def get(server: StatusServer, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{server.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_in_a_long_step_a_service_is_not_ready_but_live_until_the_limit(clock, health):
    assert (health.dead(), health.not_ready()) == (None, None)
    clock.now += 31
    assert health.dead() is None
    assert health.not_ready() == "the loop has not run for 31.0 s"
    clock.now += 90
    assert health.dead() == "the loop has not run for 121.0 s"
    health.beacon.touch()
    assert (health.dead(), health.not_ready()) == (None, None)


def test_a_loop_that_turns_without_progress_is_not_ready(clock, health):
    for _ in range(31):
        clock.now += 1
        health.beacon.touch(progressed=False)
    assert health.dead() is None
    assert health.not_ready() == "there is work, but no progress for 31.0 s"
    health.beacon.touch()
    assert health.not_ready() is None


def test_a_service_can_add_a_reason_for_not_being_ready(clock):
    assert Health(ProgressBeacon(clock), 120, 30, lambda: "it is draining").not_ready() == "it is draining"


def test_over_http(serve, clock, health):
    server = serve(health)
    assert get(server, "/livez") == get(server, "/readyz") == (200, "ok\n")
    clock.now += 31
    assert get(server, "/livez") == (200, "ok\n")
    assert get(server, "/readyz?verbose") == (503, "the loop has not run for 31.0 s\n")
    clock.now += 100
    assert get(server, "/livez") == (503, "the loop has not run for 131.0 s\n")
    assert get(server, "/metrics") == (200, "")
    not_found = "not found: the pages are /, /status.json, /metrics, /livez and /readyz\n"
    assert get(server, "/elsewhere") == (404, not_found)


def test_over_ipv6(serve, health):
    try:
        server = serve(health, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert get(server, "/livez", "[::1]") == (200, "ok\n")


def test_a_port_in_use_is_reported(health):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"cannot serve metrics and health on 127\.0\.0\.1 port"),
    ):
        StatusServer(Page(CollectorRegistry(), health), "127.0.0.1", taken.getsockname()[1])


def test_silent_and_broken_connections_are_limited_and_closed(serve, health, monkeypatch):
    monkeypatch.setattr("sluice.telemetry.server.REQUEST_SECONDS", 1.0)
    server = serve(health)
    address = ("127.0.0.1", server.port)
    silent = [socket.create_connection(address, timeout=30) for _ in range(MAX_CONNECTIONS + 8)]
    try:
        # Connections beyond the limit are closed, and those that send nothing within the time limit.
        assert all(connection.recv(1) == b"" for connection in silent)
    finally:
        for connection in silent:
            connection.close()
    for noise in (b"\x00\xff" * 500 + b"\r\n\r\n", b"GET /livez HTTP/9.9\r\n\r\n", b"POST"):
        with socket.create_connection(address, timeout=30) as broken:
            broken.sendall(noise)
    assert wait_until(lambda: is_live(server))


def is_live(server: StatusServer) -> bool:
    """False also if the server's short time limit has closed the connection, since this process may have been paused
    for longer."""
    try:
        return get(server, "/livez")[0] == 200
    except OSError:
        return False


def test_a_service_that_is_loading_is_live_and_reports_its_progress():
    port = free_ports(1)
    opened = MetricsPort(
        GatewaySettings(id="gateway-7", metrics_port=port),
        lambda startup: [gauge("loaded", "Fraction of the weights.", startup.loaded)],
    )
    try:
        server = Stub(port=port)
        assert get(server, "/livez") == (200, "ok\n")
        assert get(server, "/readyz") == (503, "starting\n")
        opened.startup.report("loading", 43, 100)
        assert get(server, "/readyz") == (503, "loading 43 %\n")
        assert "loaded 0.43" in get(server, "/metrics")[1]
        assert '"service":"gateway","id":"gateway-7"' in get(server, "/status.json")[1]
        opened.startup.report("capturing", 1, 2)
        assert get(server, "/readyz") == (503, "capturing 50 %\n")
        opened.show(ProgressBeacon(), lambda: [gauge("steps", "Steps.", 7)], lambda: None, lambda: ServiceReport("x"))
        assert get(server, "/readyz") == (200, "ok\n")
        scraped = get(server, "/metrics")[1]
        assert "loaded 1.0" in scraped
        assert "steps 7.0" in scraped
        assert '"service":"gateway","id":"gateway-7"' in get(server, "/status.json")[1]
    finally:
        opened.close()


def test_without_a_metrics_port_there_is_no_server():
    opened = MetricsPort(GatewaySettings())
    opened.show(ProgressBeacon(), list, lambda: None, lambda: ServiceReport(""))
    opened.close()

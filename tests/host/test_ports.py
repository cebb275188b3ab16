"""Checks that a port can be listened on."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from sluice.host.ports import LISTENER_VARIABLE, Port, PortError, bound, check_ports, inherited
from tests.fakes.ports import free_ports


def refusal(*ports: Port) -> str:
    with pytest.raises(PortError) as caught:
        check_ports(ports)
    return str(caught.value)


@pytest.fixture
def taken():
    """A port that a plain server listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use_is_named_with_the_remedy(taken, host) -> None:
    assert refusal(Port("metrics_port", host, taken)) == (
        f"port {taken} on {host} is in use: stop the process that uses it, or choose another with --metrics-port"
    )


def test_a_grpc_server_that_shares_its_port_is_detected() -> None:
    """gRPC sets SO_REUSEPORT, so a second gRPC server could bind the port and would receive some connections."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 1)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "is in use" in refusal(Port("port", "127.0.0.1", port))
    finally:
        server.stop(None).wait()


def test_all_problems_are_reported_in_one_line(taken) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        error = refusal(
            Port("port", "127.0.0.1", taken, "router-1"), Port("metrics_port", "127.0.0.1", number, "detok-0")
        )
    assert f"port {taken} on 127.0.0.1 (router-1) is in use, port {number} on 127.0.0.1 (detok-0) is in use: " in error
    assert error.endswith("--port and --metrics-port")
    assert "\n" not in error


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(taken, host) -> None:
    error = refusal(Port("port", host, taken))
    assert error.startswith(f"port {taken} on {host} cannot be used: ")
    assert "choose another" not in error


def test_free_ports_any_port_and_a_recently_closed_port_are_accepted() -> None:
    number = free_ports(1)
    with socket.create_server(("127.0.0.1", number)) as server:
        client = socket.create_connection(("127.0.0.1", number))
        accepted, _ = server.accept()
    # The side that closes first remains in TIME_WAIT.
    accepted.close()
    client.close()
    check_ports([Port("port", "127.0.0.1", number), Port("admin_port", "127.0.0.1", 0)])


def test_sockets_have_the_protocol_without_which_asyncio_delays_small_parts():
    with bound("127.0.0.1", 0) as listener:
        shared = inherited({LISTENER_VARIABLE: str(os.dup(listener.fileno()))})
        assert shared is not None
        with shared:
            assert [each.proto for each in (listener, shared)] == [socket.IPPROTO_TCP] * 2
    assert inherited({}) is None

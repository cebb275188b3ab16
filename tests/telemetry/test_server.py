"""`/livez` answers regardless of other connections, and without a free file descriptor."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sluice.telemetry.pages import Page
from sluice.telemetry.probes import Health
from sluice.telemetry.server import MAX_CONNECTIONS, MAX_HEAD_BYTES, Connections, StatusServer
from sluice.telemetry.service_status import ProgressBeacon
from tests.fakes.processes import LIMIT

REQUEST = b"GET /livez HTTP/1.0\r\n"


@pytest.fixture
def serve():
    with ExitStack() as stack:

        def start() -> tuple[str, int]:
            health = Health(ProgressBeacon(), 120, 30, lambda: None)
            server = StatusServer(Page(CollectorRegistry(), health), "127.0.0.1", 0)
            stack.callback(server.close)
            return "127.0.0.1", server.port

        yield start


def probe(address) -> bytes:
    with socket.create_connection(address, timeout=LIMIT) as connection:
        connection.sendall(REQUEST + b"\r\n")
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_slow_connections_are_closed_for_new_ones(serve, monkeypatch):
    monkeypatch.setattr("sluice.telemetry.server.REQUEST_SECONDS", 1e9)
    # Otherwise a new connection is refused if the thread of a closed one does not get to run in time.
    monkeypatch.setattr("sluice.telemetry.server.END_SECONDS", LIMIT)
    address = serve()
    with ExitStack() as stack:
        slow = []
        for _ in range(2 * MAX_CONNECTIONS):
            slow.append(stack.enter_context(socket.create_connection(address, timeout=LIMIT)))
            slow[-1].sendall(b"GET /li")
        for _ in range(3):
            assert probe(address).endswith(b"ok\n")
        # The oldest connections were closed, the latest are open.
        assert all(connection.recv(1) == b"" for connection in slow[: MAX_CONNECTIONS + 1])
        slow[-1].sendall(b"vez HTTP/1.0\r\n\r\n")
        assert slow[-1].recv(4096).startswith(b"HTTP/1.0 200")


def test_thousands_of_pipelined_probes_are_answered(serve):
    count = 5000
    request = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    with socket.create_connection(serve(), timeout=LIMIT) as connection:
        sender = threading.Thread(target=connection.sendall, args=(request * count + REQUEST + b"\r\n",))
        sender.start()
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        sender.join()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == count
    assert answers.count(b"ok\n") == count + 1, "the last one is HTTP/1.0, after which the connection ends"


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"HEAD /livez HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"POST /livez HTTP/1.1\r\nContent-Length: 4\r\n\r\nGET ", b"HTTP/1.1 200 OK"),
        (b"\r\nGET /livez HTTP/1.1\r\nConnection: close\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /livez HTTP/one\r\n\r\n", b"<!DOCTYPE HTML>"),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", b""),
    ],
    ids=["no body in the answer", "body in the request", "asked to close", "invalid", "too long"],
)
def test_a_connection_ends_after_a_request_that_does_not_allow_a_next_one(serve, request_head, status):
    with socket.create_connection(serve(), timeout=LIMIT) as connection:
        connection.sendall(request_head + REQUEST)
        with suppress(ConnectionError):
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
            assert answer.partition(b"\r\n")[0].startswith(status)
            assert answer.count(b"200 OK") == status.endswith(b"OK")


def test_a_client_that_keeps_sending_small_pieces_is_disconnected_too(serve, monkeypatch):
    monkeypatch.setattr("sluice.telemetry.server.REQUEST_SECONDS", 1.0)
    address = serve()
    with socket.create_connection(address, timeout=LIMIT) as connection:
        connection.sendall(REQUEST)
        end, ended = time.monotonic() + LIMIT, threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not ended.wait(0.02) and time.monotonic() < end:
                    connection.sendall(b"a")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
            assert time.monotonic() < end
        finally:
            ended.set()
            thread.join()


def test_the_oldest_connection_is_closed_first_and_late_connections_immediately():
    now = [0.0]
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(3)]
        for _, client in pairs:
            client.settimeout(LIMIT)
        connections = Connections(2, 10.0, lambda: now[0])
        assert connections.add(pairs[0][0])
        now[0] = 9.0
        assert connections.add(pairs[1][0])
        connections.close_late()
        now[0] = 10.0
        connections.close_late()
        assert pairs[0][1].recv(1) == b""
        connections.remove(pairs[0][0])
        assert connections.add(pairs[2][0])
        connections.close_oldest()
        assert pairs[1][1].recv(1) == b""
        # Its thread has not ended: there is no room yet.
        connections.close_oldest()
        assert pairs[2][1].recv(1) == b""


def test_a_connection_that_was_answered_later_is_closed_later():
    now = [0.0]
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(2)]
        connections = Connections(2, 10.0, lambda: now[0])
        assert all(connections.add(server) for server, _ in pairs)
        now[0] = 9.0
        connections.renew(pairs[0][0])
        connections.close_oldest()
        assert pairs[1][1].recv(1) == b""
        now[0] = 18.0
        connections.close_late()
        pairs[0][0].sendall(b"open")
        assert pairs[0][1].recv(4) == b"open"


CHILD = """
import json, os, resource, sys
from prometheus_client import CollectorRegistry
from sluice.host.descriptors import raise_limit
from sluice.telemetry.server import Connections
from sluice.telemetry.pages import Page
from sluice.telemetry.server import Health, StatusServer
from sluice.telemetry.service_status import ProgressBeacon
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
limit = raise_limit()
health = Health(ProgressBeacon(), 1e9, 1e9, lambda: None)
server = StatusServer(Page(CollectorRegistry(), health), "127.0.0.1", 0)
held = []
def fill():
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        return len(held)
full = fill()
print(json.dumps([server.port, limit, full]), flush=True)
# Like a ZeroMQ thread under a flood of connections: takes every descriptor that becomes free, and returns it later.
while True:
    fill()
    while len(held) > full:
        os.close(held.pop())
"""


@pytest.mark.process
def test_without_a_free_descriptor():
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    )
    try:
        port, limit, full = json.loads(child.stdout.readline())
        assert (limit, full > 200) == (256 - 32, True)
        for _ in range(3):
            assert probe(("127.0.0.1", port)).endswith(b"ok\n")
    finally:
        child.kill()
        child.wait()

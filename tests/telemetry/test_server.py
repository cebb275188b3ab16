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
from sluice.telemetry.server import MAX_CONNECTIONS, Connections, Health, StatusServer
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


CHILD = """
import json, os, resource, sys
from prometheus_client import CollectorRegistry
from sluice.ring.descriptors import raise_limit
from sluice.telemetry.pages import Page
from sluice.telemetry.server import Connections, Health, StatusServer
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

"""Rings keep serving when log lines cannot be written, and after their launcher has died."""

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from itertools import count

import pytest

from sluice import tiny_model
from sluice.client import Client
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, is_alive, wait_until

pytestmark = pytest.mark.timeout(300)

STREAMS = 8
SERVICES = {"router": "router", "engine": "engine_worker", "detok": "detok_service"}


def get(port: int, path: str) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT) as answer:
        return answer.read().decode()
    return ""


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def unread_pipe() -> int:
    """A full pipe whose reader never reads and stays open until this process ends."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    os.set_blocking(writer, True)
    return writer


@pytest.mark.parametrize(
    "stderr",
    [
        lambda: os.open("/dev/full", os.O_WRONLY),
        *(pytest.param(pipe, marks=pytest.mark.long) for pipe in (closed_pipe, unread_pipe)),
    ],
    ids=["full", "closed", "unread"],
)
def test_requests_are_served_while_log_lines_cannot_be_written(tmp_path, stderr):
    ports = dict(zip([*SERVICES, "grpc"], count(free_ports(4)), strict=False))
    inboxes = {role: f"ipc://{tmp_path}/{role}" for role in SERVICES}
    flags_of = {
        "router": ["--port", ports["grpc"], "--engines", inboxes["engine"], "--detokenizers", inboxes["detok"]],
        "engine": ["--threads", 1, "--kv-cache-tokens", 8192],
        "detok": [],
    }
    descriptor, processes = stderr(), {}
    try:
        for role, module in SERVICES.items():
            command = [sys.executable, "-m", module, "--model", tiny_model.path(), "--listen", inboxes[role]]
            command += ["--metrics-port", ports[role], "--log-level", "debug", *flags_of[role]]
            processes[role] = subprocess.Popen(list(map(str, command)), stderr=descriptor)
        assert wait_until(lambda: get(ports["router"], "/readyz") == "ok\n", 2 * LIMIT)
        with Client(f"127.0.0.1:{ports['grpc']}") as client:
            texts = {client.generate("def f(", max_tokens=16, seed=1).text for _ in range(STREAMS)}
            assert len(texts) == 1
        for role in SERVICES:
            assert get(ports[role], "/livez") == "ok\n"
            if stderr is not unread_pipe:
                (line,) = [
                    line
                    for line in get(ports[role], "/metrics").splitlines()
                    if line.startswith(f"sluice_{role}_log_lines_lost_total ")
                ]
                assert float(line.split()[1]) >= (STREAMS if role == "router" else 1)
        for process in processes.values():
            process.terminate()
        assert [process.wait(LIMIT) for process in processes.values()] == [0, 0, 0]
    finally:
        os.close(descriptor)
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.long
def test_a_ring_serves_while_its_launcher_writes_to_a_full_disk(tmp_path):
    port = free_ports(1)
    command = [sys.executable, "-m", "sluice", "serve", "--port", str(port), "--demo", "def f(", "--verbose"]
    with open("/dev/full", "wb") as full:
        launcher = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        address = f"127.0.0.1:{port}"
        assert wait_until(lambda: serves(address), 2 * LIMIT)
        with Client(address) as client:
            assert client.generate("def f(", max_tokens=4).text
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(LIMIT) in (0, 130)
    finally:
        launcher.kill()
        launcher.wait()


def serves(address: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "health", "--address", address], capture_output=True, check=False
    )
    return done.returncode == 0


def test_a_stream_is_completed_after_its_launcher_was_killed():
    code = """
import signal, sys
from sluice.launch import Ring
with Ring(drain_timeout=60, port=0) as ring:
    print(ring.address, *ring.pids.values(), flush=True)
    signal.pause()
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        address, *printed = launcher.stdout.readline().split()
        pids = list(map(int, printed))
        with Client(address) as client, client.stream("def f(", max_tokens=400, seed=1) as stream:
            tokens = 0
            for chunk in stream:
                if not tokens:
                    launcher.kill()
                    launcher.wait()
                tokens += chunk.token_count
        assert stream.usage.completion_tokens == tokens > 1
        assert wait_until(lambda: not any(map(is_alive, pids)))
    finally:
        launcher.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

"""`sluice serve` as a user runs it: it becomes ready, serves, drains, and leaves no process behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.machine import descendants
from tests.fakes.processes import is_alive, wait_until

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def sluice(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sluice", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        **options,
    )


def ready(process: subprocess.Popen) -> dict:
    """Wait for the launcher's `ready` line and return it. Checks that all lines before it are JSON."""
    for text in process.stderr:
        line = json.loads(text)
        if (line["service"], line["event"]) == ("launcher", "ready"):
            return line
    raise AssertionError("the launcher ended without being ready")


@pytest.fixture
def serve():
    """Starts `sluice serve`, and kills it at the end of the test."""
    started: list[subprocess.Popen] = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "sluice", "serve", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, process_group=0, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_ring_serves_every_command_and_drains_on_ctrl_c(serve) -> None:
    process = serve("--port", "0")
    line = ready(process)
    (address,) = line["addresses"]
    assert line["model"] == "tiny"
    _, *children = descendants(process.pid)
    assert len(children) >= 4

    options = ("--address", address, "--max-tokens", "24", "--temperature", "0")
    first = sluice("generate", "def fibonacci(n):", *options)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.strip()
    assert sluice("generate", "def fibonacci(n):", *options).stdout == first.stdout
    refused = sluice("generate", "x", "--address", address, "--temperature", "9")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --temperature")

    chat = sluice("chat", "--address", address, "--max-tokens", "8", "--temperature", "0", input="hi\nagain\n")
    assert (chat.returncode, chat.stderr) == (0, "")

    health = sluice("health", "--address", address)
    assert health.returncode == 0
    for expected in ("serves tiny", "engine-0", "detok-0", "detok-1", "serving"):
        assert expected in health.stdout

    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert all(isinstance(json.loads(line), dict) for line in err.splitlines())
    assert "draining" in err
    assert err.count('"event": "request_ended"') == 5
    assert "fibonacci" not in err
    assert wait_until(lambda: not any(map(is_alive, children)))
    assert sluice("health", "--address", address).returncode == 1


@pytest.mark.long
def test_the_demo_is_printed_and_the_ring_keeps_serving(serve) -> None:
    process = serve("--port", "0", "--demo", "def fibonacci(n):")
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines[1].startswith("def fibonacci(n):")
    while '"event": "request_ended"' not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("drain", [pytest.param("30", marks=pytest.mark.long), "0"])
def test_a_signal_during_the_demo_ends_the_ring_cleanly(serve, drain) -> None:
    process = serve("--port", "0", "--drain-timeout", drain, "--demo", "def fibonacci(n):")
    assert process.stdout.readline() == "\n"
    process.stdout.read(len("def fibonacci(n):"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert all(isinstance(json.loads(line), dict) for line in err.splitlines()), err


@pytest.mark.long
def test_a_stream_is_completed_while_the_ring_drains(serve) -> None:
    process = serve("--port", "0", "--drain-timeout", "60")
    (address,) = ready(process)["addresses"]
    command = [sys.executable, "-m", "sluice", "generate", "import os\n", "--address", address, "--max-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as client:
        assert client.stdout.read(1)
        process.send_signal(signal.SIGTERM)
        client.stdout.read()
        assert client.wait(60) == 0
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_port_in_use_is_named_in_the_error(serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = serve("--port", port)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    error = json.loads(err)
    assert error["event"] == "start_failed"
    assert f"port {port} on 127.0.0.1 (router) is in use" in error["error"]

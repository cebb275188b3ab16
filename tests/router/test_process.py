"""python -m router as a process."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import grpc
import pytest
import zmq
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from router.__main__ import with_template
from sluice.checkpoint.folder import open_checkpoint
from sluice.lanes.inbox import Inbox
from sluice.lanes.keys import Security
from sluice.tiny_model import path
from sluice.wire.heartbeats import Hello

pytestmark = [pytest.mark.process, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "router"]


def start(folder, *arguments):
    return subprocess.Popen(
        [*COMMAND, "--model", str(path()), "--port", "0", "--listen", f"ipc://{folder}/router", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_it_listens_and_ends_on_a_signal(folder, number):
    with start(folder) as process:
        ready = json.loads(process.stderr.readline())
        assert (ready["event"], ready["service"], ready["model"]) == ("ready", "router", "checkpoint")
        assert ready["settings"]["listen"] == f"ipc://{folder}/router"
        assert "max_live" not in ready["settings"], "it has its default"
        with grpc.insecure_channel(ready["address"]) as channel:
            status = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        process.send_signal(number)
        events = [json.loads(line)["event"] for line in process.stderr]
        assert process.wait(60) == 0
        assert events == ["draining", "stopped"]


def test_a_chat_template_replaces_the_models(tmp_path):
    file = tmp_path / "short.jinja"
    file.write_text("{{ messages[0].content }}!")
    checkpoint = with_template(replace(open_checkpoint(str(path())), tool_use_template="{{ tools }}"), file)
    assert checkpoint.tool_use_template is None
    assert checkpoint.chat_template == "{{ messages[0].content }}!"


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        (("--engines", "nonsense"), "nonsense"),
        (("--engines", "tcp://10.0.0.1:5557"), "--insecure-ring"),
        (("--host", "0.0.0.0"), "host 0.0.0.0 can be reached from other machines"),
        (("--auth", "no_such_module:f"), "no_such_module"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (("--model", "/no/such/folder"), "/no/such/folder"),
                (("--listen", "tcp://300.0.0.1:1"), "tcp://300"),
                (("--keys", "/no/such/folder"), "/no/such/folder/secret/router.key"),
                (("--host", "203.0.113.7", "--port", "1", "--insecure"), "203.0.113.7"),
                (("--tls-certificate", "/no/such.pem", "--tls-key", "/no/such.key"), "/no/such.pem"),
                (("--tokens-file", "/no/such/tokens"), "/no/such/tokens"),
                (("--chat-template", "/no/such.jinja"), "/no/such.jinja"),
            )
        ),
    ],
)
def test_the_reason_why_it_cannot_start_is_one_line(folder, arguments, quoted):
    with start(folder, *arguments) as process:
        stderr = process.stderr.read()
        assert process.wait(60) == 1
    assert quoted in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("address", ["ipc://{}/router", "tcp://127.0.0.1:*"])
def test_a_ring_address_in_use_is_reported_in_one_line(folder, address):
    security = Security(insecure=True)
    with zmq.Context() as context:
        inbox = Inbox(context, address.format(folder), Hello, security=security)
        owner = f"process {os.getpid()}" if address.startswith("ipc") else "another process"
        with start(folder, "--listen", inbox.address, "--insecure-ring") as process:
            logged = json.loads(process.stderr.read())
            assert logged["error"] == f"cannot listen on {inbox.address}: {owner} listens there"
            assert process.wait(60) == 1
        inbox.close()


@pytest.mark.parametrize(
    "flag", ["--port", *(pytest.param(flag, marks=pytest.mark.long) for flag in ("--admin-port", "--metrics-port"))]
)
def test_a_port_in_use_is_one_line_with_the_remedy(folder, flag):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with start(folder, flag, str(port)) as process:
            logged = json.loads(process.stderr.read())
            assert process.wait(60) == 1
    assert logged["event"] == "start_failed"
    assert logged["error"] == (
        f"port {port} on 127.0.0.1 is in use: stop the process that uses it, or choose another with {flag}"
    )


def test_the_port_of_another_router_is_in_use(folder, tmp_path):
    with start(folder) as first:
        port = json.loads(first.stderr.readline())["address"].rpartition(":")[2]
        with start(tmp_path, "--port", port) as second:
            assert f"port {port} on 127.0.0.1 is in use" in json.loads(second.stderr.read())["error"]
            assert second.wait(60) == 1
        first.terminate()


def test_it_imports_neither_torch_nor_transformers():
    code = "import sys, router.__main__; print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"

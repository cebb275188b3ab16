"""The gateway as a process: start, health probes, shutdown."""

import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from sluice.cli.commands import app
from tests.fakes.certificates import Authority
from tests.fakes.failures import Failure
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, wait_until
from tests.fakes.server import serve

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.process


class Process:
    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "gateway", *arguments]
        self.popen = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict] = []
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stderr:
            self.text += line
            # gRPC's own library writes plain lines.
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def line(self, event: str) -> dict:
        """The first log line with this event. Waits for it."""
        lines: list[dict] = []

        def line_or_end() -> bool:
            # Check in this order, so that a line written just before the end is not missed.
            ended = not self._reader.is_alive()
            lines[:] = [line for line in list(self.lines) if line["event"] == event]
            return bool(lines) or ended

        assert wait_until(line_or_end), (event, self.text)
        assert lines, (event, self.text)
        return lines[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        status = self.popen.wait(LIMIT)
        self._reader.join(LIMIT)
        assert status >= 0, (signal.Signals(-status).name, self.text)
        return status


@pytest.fixture
def start():
    started: list[Process] = []

    def run(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield run
    for process in started:
        process.popen.kill()
        process.popen.wait()


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_from_start_to_end(start, address, script):
    port = free_ports(1)
    process = start("--routers", address, "--port", "0", "--metrics-port", str(port), "--drain-timeout", "60")
    ready = process.line("ready")
    assert ready["settings"].items() >= {"routers": [address], "drain_timeout": 60.0}.items()
    url = f"http://{ready['address']}"
    assert wait_until(lambda: probe(port, "/readyz")[0] == 200)
    assert wait_until(lambda: httpx.get(f"{url}/health", timeout=LIMIT).status_code == 200)
    body = {"prompt": "x", "user": "ann"}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).json()["model"] == "tiny"
    line = process.line("request_ended")
    assert (line["path"], line["status"], line["user"]) == ("/v1/completions", 200, "ann")
    counted = 'sluice_gateway_requests_total{path="/v1/completions",status="200"} 1.0'
    assert wait_until(lambda: counted in probe(port, "/metrics")[1])
    script.hangs = True
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=LIMIT) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        process.popen.send_signal(signal.SIGTERM)
        assert wait_until(lambda: probe(port, "/readyz") == (503, "it is draining\n"))
        script.hangs = False
        assert list(lines)[-2] == "data: [DONE]"
    assert process.popen.wait(LIMIT) == 0
    process.line("stopped")
    # A warning of gRPC about an experiment in GRPC_EXPERIMENTS that a new version no longer has.
    assert "Unknown experiment" not in process.text


def test_tls(start, address, script, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    authority, metrics = Authority(tmp_path, "authority"), free_ports(1)
    pair = authority.issue("gateway")
    files = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    process = start("--routers", address, "--port", "0", "--metrics-port", str(metrics), *files)
    address = process.line("ready")["address"]
    assert wait_until(lambda: probe(metrics, "/readyz")[0] == 200)
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=authority.certificate), timeout=LIMIT)
    with trusting, OpenAI(base_url=f"https://{address}/v1", api_key="none", http_client=trusting) as client:
        request = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        assert client.chat.completions.create(**request).choices[0].message.content == "Hello, world"
        chunks = list(client.chat.completions.create(**request, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
        # As measured by `sluice bench`.
        options = ["--requests", "2", "--tls-ca", str(authority.certificate), "--json", "-"]
        result = CliRunner().invoke(app, ["bench", f"https://{address}", *options])
        assert json.loads(result.stdout)["completed"] == 2
        # A disconnect is noticed under TLS, too.
        script.hangs = True
        script.gone.clear()
        stream = client.chat.completions.create(**request, stream=True)
        next(stream)
        stream.close()
        assert script.gone.wait(LIMIT)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{address}/health", timeout=LIMIT)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{address}/health", timeout=LIMIT)
    assert process.end() == 0


def test_requests_that_do_not_end_in_time(start, address, script):
    script.hangs = True
    process = start("--routers", address, "--port", "0", "--drain-timeout", "1")
    url = f"http://{process.line('ready')['address']}/v1/completions"
    with (
        ThreadPoolExecutor() as threads,
        httpx.stream("POST", url, json={"prompt": "x", "stream": True}, timeout=LIMIT) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        whole = threads.submit(httpx.post, url, json={"prompt": "x"}, timeout=LIMIT)
        assert wait_until(lambda: len(script.hanging) == 2)
        process.popen.send_signal(signal.SIGTERM)
        # Otherwise a stream that was cut would look complete.
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        answer = whole.result(LIMIT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert process.popen.wait(LIMIT) == 0
    assert script.gone.wait(LIMIT)
    process.line("stopped")
    ends = [line for line in process.lines if line["event"] == "request_ended"]
    assert {(line["status"], line["reason"], line["level"]) for line in ends} == {
        (200, "shutting_down", "warning"),
        (503, "shutting_down", "error"),
    }


def test_it_waits_for_a_router(start, script):
    grpc_port = free_ports(2)
    port = grpc_port + 1
    process = start("--routers", f"127.0.0.1:{grpc_port}", "--port", "0", "--metrics-port", str(port))
    assert wait_until(lambda: probe(port, "/livez")[0] == 200)
    assert wait_until(lambda: probe(port, "/readyz") == (503, "no router is ready\n"))
    with serve(script, grpc_port):
        process.line("ready")
        assert wait_until(lambda: probe(port, "/readyz")[0] == 200)
    process.line("routers_lost")
    assert process.end() == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "insecure"),
        (("--routers", ""), "routers"),
        (("--tls-key", "k"), "tls_certificate and tls_key must be set together"),
        (("--tls-certificate", "/no/such", "--tls-key", "/no/such"), "/no/such"),
        (("--router-key", "k"), "router_certificate and router_key"),
        (("--router-certificate", "c", "--router-key", "k"), "needs router_ca"),
        (("--router-ca", "/no/such"), "/no/such"),
        (("--tool-parser", "x"), "tool_parser"),
        (("--max-body-bytes", "1"), "max_body_bytes"),
    ],
)
def test_the_reason_why_it_cannot_start_is_printed(start, arguments, message):
    process = start("--port", "0", *arguments)
    assert process.popen.wait(LIMIT) == 1
    assert message in process.line("start_failed")["error"]


def test_a_port_in_use(start, address):
    first = start("--routers", address, "--port", "0")
    port = first.line("ready")["address"].rpartition(":")[2]
    second = start("--routers", address, "--port", port)
    assert second.popen.wait(LIMIT) == 1
    assert f"port {port}" in second.line("start_failed")["error"]


def test_prompts_are_not_logged(start, address, script):
    process = start("--routers", address, "--port", "0", "--log-level", "debug")
    url = f"http://{process.line('ready')['address']}"
    secret = "s3cr3t"
    with httpx.Client(base_url=url, timeout=LIMIT) as client:
        for failure in (None, Failure(grpc.StatusCode.INTERNAL, secret)):
            script.failure = failure
            client.post("/v1/completions", json={"prompt": secret, secret: secret, "temperature": secret})
            client.post("/v1/completions", json={"prompt": secret}, headers={"authorization": f"Bearer {secret}"})
            client.post(f"/{secret}", content=secret)
    assert process.end() == 0
    assert secret not in process.text

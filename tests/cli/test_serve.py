"""`sluice serve` with stand-in services. tests/system uses the real ones."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.cli.serve import Interrupt, watch
from sluice.launch import Display, Ring
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(300)]

SEVERAL_STARTS = 4 * LIMIT
"""Seconds for services to start one after the other on a busy machine."""

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "tests" / "fakes" / "services.py"

CODE = """
import sys
from sluice.cli.commands import app
from sluice.launch import plan
from sluice.launch import local_ring as ring
ring.Plan = lambda **options: plan.Plan(**options, python=(sys.executable, {services!r}, {folder!r}))
sys.argv = ["sluice", "serve", "--port", "0", *{arguments!r}]
app()
"""


class Serving:
    """A `sluice serve` process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        code = CODE.format(services=str(SERVICES), folder=str(folder), arguments=arguments)
        self.folder = folder
        self.log = folder / "stderr"
        self._seen = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            process_group=0,
        )

    def line(self, event: str) -> dict:
        """Wait for the next line of this event on stderr, where every line is JSON."""
        assert wait_until(lambda: self._next(event) is not None, SEVERAL_STARTS), self.log.read_text()
        number = self._next(event)
        assert number is not None
        self._seen = number + 1
        return self.lines()[number]

    def lines(self) -> list[dict]:
        """The complete lines on stderr."""
        return [json.loads(text) for text in self.log.read_text().splitlines(keepends=True) if text.endswith("\n")]

    def _next(self, event: str) -> int | None:
        """Number of the first line of this event after those that `line` has returned."""
        return next((i for i, line in enumerate(self.lines()) if i >= self._seen and line["event"] == event), None)

    def ready(self) -> dict:
        """Wait until the ring serves."""
        return self.line("ready")

    def pid(self, name: str) -> int:
        return json.loads((self.folder / f"{name}.json").read_text())["pid"]

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr. Fails if a child is still running or a line on stderr is not JSON."""
        out, _ = self.process.communicate(timeout=SEVERAL_STARTS)
        err = self.log.read_text()
        assert all(isinstance(json.loads(line), dict) for line in err.splitlines()), err
        assert wait_until(lambda: not any(is_alive(self.pid(note.stem)) for note in self.folder.glob("*.json")))
        return self.process.returncode, out, err


@pytest.fixture
def serving(tmp_path):
    started: list[Serving] = []

    def start(*arguments: str) -> Serving:
        started.append(Serving(tmp_path, *arguments))
        return started[-1]

    yield start
    for serve in started:
        if serve.process.poll() is None:
            serve.process.kill()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGINT, signal.SIGHUP))],
)
def test_ready_line_and_clean_exit(serving, number) -> None:
    serve = serving("--engines", "2")
    ready = serve.ready()
    assert (ready["service"], ready["model"]) == ("launcher", "tiny")
    assert [address.rpartition(":")[0] for address in ready["addresses"]] == ["127.0.0.1"]
    assert (ready["routers"], ready["engines"], ready["detokenizers"]) == (1, 2, 2)
    assert "status_pages" not in ready
    # A terminal sends Ctrl-C to the whole foreground group. The services must not receive it.
    os.killpg(serve.process.pid, number)
    code, out, err = serve.end()
    assert code == 0
    assert out == ""
    assert "draining" in err
    assert all((serve.folder / f"{name}.ended").exists() for name in ("router", "engine-1", "detok-0"))
    assert '"event": "something odd"' in err
    assert '"event": "request_ended"' in err
    assert '"event": "detail"' not in err


def test_the_ready_line_has_the_status_page_of_each_router(serving) -> None:
    port = free_ports(5)
    ready = serving("--routers", "2", "--metrics-port", str(port)).ready()
    assert ready["status_pages"] == [f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port + 1}/"]


def test_demo(serving) -> None:
    serve = serving("--demo", "def f():", "--verbose")
    serve.ready()
    assert serve.process.stdout is not None
    assert serve.process.stdout.readline() == "\n"
    assert serve.process.stdout.readline() == "def f():Hello, world\n"
    assert serve.process.poll() is None
    serve.process.send_signal(signal.SIGINT)
    code, _, err = serve.end()
    assert code == 0
    assert '"event": "detail"' in err


def test_an_interrupt_that_a_finalizer_swallows_takes_effect() -> None:
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        watch(Ring(), interrupt, Display())


def test_a_second_interrupt_stops_immediately(serving, tmp_path) -> None:
    (tmp_path / "router.do").write_text("deaf")
    serve = serving("--drain-timeout", "3600")
    serve.ready()
    serve.process.send_signal(signal.SIGINT)
    serve.line("draining")
    assert serve.process.poll() is None
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 130


@pytest.mark.long
def test_exits_and_recoveries_are_reported_until_a_role_has_no_service(serving, tmp_path) -> None:
    serve = serving()
    serve.ready()
    killed = serve.pid("detok-0")
    os.kill(killed, signal.SIGKILL)
    assert serve.line("service_exited")["how"] == "was killed by SIGKILL"
    assert serve.line("service_recovered")["id"] == "detok-0"
    assert serve.pid("detok-0") != killed
    assert serve.process.poll() is None
    (tmp_path / "engine-0.do").write_text("refuse")
    os.kill(serve.pid("engine-0"), signal.SIGKILL)
    exited = serve.line("service_exited")
    while not exited.get("given_up"):
        exited = serve.line("service_exited")
    assert (exited["id"], exited["how"]) == ("engine-0", "ended with code 1: the disk is full")
    assert serve.line("failed")["error"] == "no engine is left: stopping"
    assert serve.end()[0] == 1


def test_a_rolling_restart_on_a_signal(serving) -> None:
    serve = serving("--routers", "2")
    assert len(serve.ready()["addresses"]) == 2
    names = ("engine-0", "detok-0", "detok-1", "router-0", "router-1")
    pids_before = [serve.pid(name) for name in names]
    serve.process.send_signal(signal.SIGUSR2)
    serve.line("restarted")
    assert not set(pids_before) & {serve.pid(name) for name in names}
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 0


def test_ports_beyond_the_highest_are_refused(serving) -> None:
    code, _, err = serving("--metrics-port", "65535").end()
    assert code == 1
    (line,) = err.splitlines()
    assert json.loads(line)["error"] == "ports 65535 to 65538 are needed, but the highest port is 65535"


def test_an_exit_during_the_start_is_reported_with_its_reason(serving, tmp_path) -> None:
    (tmp_path / "engine-0.do").write_text("die")
    serve = serving()
    code, out, err = serve.end()
    assert code == 1
    assert out == ""
    assert "Traceback: it broke" in err
    assert json.loads(err.splitlines()[-1])["error"] == "engine-0 ended with code 3 while starting"


def test_why_a_service_cannot_start_is_reported_once(serving, tmp_path) -> None:
    (tmp_path / "engine-0.do").write_text("refuse")
    code, _, err = serving().end()
    assert code == 1
    assert err.count("the disk is full") == 1
    assert json.loads(err.splitlines()[-1])["error"] == "engine-0 cannot start: the disk is full"


@pytest.mark.quick(2)
@pytest.mark.parametrize("setting", ["port", "admin_port", "metrics_port", "http_port"])
def test_a_port_in_use_is_reported_before_anything_is_started(serving, setting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        flag = f"--{setting.replace('_', '-')}"
        # A gateway needs to know the routers' port.
        serve = serving(flag, str(port), *(("--port", str(free_ports(1))) if setting == "http_port" else ()))
        code, out, err = serve.end()
    assert (code, out) == (1, "")
    error = json.loads(err)["error"]
    # The following ports may be in use by other programs too.
    assert f"port {port} on 127.0.0.1 ({'gateway' if setting == 'http_port' else 'router'}) is in use" in error
    assert error.endswith(f": stop the process that uses it, or choose another with {flag}")
    assert list(serve.folder.glob("*.json")) == []


def test_the_terminal_shows_short_lines(tmp_path) -> None:
    master, slave = pty.openpty()
    metrics_port = free_ports(4)
    code = CODE.format(services=str(SERVICES), folder=str(tmp_path), arguments=("--metrics-port", str(metrics_port)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, env=environment, cwd=ROOT)
    os.close(slave)
    shown = b""
    while b"ready: " not in shown:
        shown += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while output := os.read(master, 4096):
            shown += output
    assert process.wait(LIMIT) == 0
    text = shown.decode()
    parts = rf"status page http://127.0.0.1:{metrics_port}/, 1 router, 1 engine, 2 detokenizers"
    assert re.search(
        rf'ready: tiny on 127.0.0.1:(\d+), {parts}. Ctrl-C stops it. Try: .* generate --address 127.0.0.1:\1 "def ',
        text,
    )
    assert "draining; press Ctrl-C again to stop immediately" in text
    assert "{" not in text


def test_interrupt_while_starting(serving, tmp_path) -> None:
    (tmp_path / "router.do").write_text("hang")
    serve = serving()
    assert wait_until((tmp_path / "router.json").exists)
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 130


def test_an_invalid_model_is_reported_in_one_line(sluice, tmp_path) -> None:
    result = sluice("serve", str(tmp_path / "nothing"))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "nothing" in json.loads(line)["error"]

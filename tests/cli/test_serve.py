"""`sluice serve` with stand-in services; tests/system has the real ones."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.cli.serve import Interrupt, watch
from sluice.launch import Ring
from tests.fakes.processes import is_alive, wait_until

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "tests" / "fakes" / "services.py"

CODE = """
import sys
from sluice.cli import app
from sluice.launch import plan, ring
ring.Plan = lambda **options: plan.Plan(**options, python=(sys.executable, {services!r}, {folder!r}))
sys.argv = ["sluice", "serve", "--port", "0", *{arguments!r}]
app()
"""


class Serving:
    """A `sluice serve` process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        code = CODE.format(services=str(SERVICES), folder=str(folder), arguments=arguments)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            process_group=0,
        )

    def ready(self) -> str:
        """Waits for the first line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def pid(self, name: str) -> int:
        import json

        return json.loads((self.folder / f"{name}.json").read_text())["pid"]

    def end(self) -> tuple[int, str, str]:
        """Exit code and what else was printed; fails if a child is left."""
        out, err = self.process.communicate(timeout=60)
        assert wait_until(lambda: not any(is_alive(self.pid(note.stem)) for note in self.folder.glob("*.json")))
        return self.process.returncode, out, err


@pytest.fixture
def serving(tmp_path):
    started: list[Serving] = []

    def start(*arguments: str) -> Serving:
        started.append(Serving(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ready_line_and_clean_end(serving, number) -> None:
    serve = serving("--engines", "2")
    line = serve.ready()
    assert line.startswith("ready: tiny on 127.0.0.1:")
    assert "1 router, 2 engines, 2 detokenizers" in line
    assert " generate --address 127.0.0.1:" in line
    assert line.endswith('"def fibonacci(n):"\n')
    # The terminal sends Ctrl-C to the whole foreground group; the services must not get it.
    os.killpg(serve.process.pid, number)
    code, out, err = serve.end()
    assert code == 0
    assert out == ""
    assert "draining" in err
    assert all((serve.folder / f"{name}.ended").exists() for name in ("router", "engine-1", "detok-0"))
    assert '"event": "something odd"' in err
    assert '"event": "request"' in err
    assert '"event": "detail"' not in err


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


def test_an_interrupt_that_a_finalizer_swallowed_counts() -> None:
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        watch(Ring(), interrupt)


def test_second_interrupt_stops_at_once(serving, tmp_path) -> None:
    (tmp_path / "router.do").write_text("deaf")
    serve = serving("--drain-timeout", "3600")
    serve.ready()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.stderr is not None
    assert any("draining" in line for line in serve.process.stderr)
    assert serve.process.poll() is None
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 130


def test_deaths_and_returns_are_told_until_nothing_is_left(serving, tmp_path) -> None:
    serve = serving()
    serve.ready()
    killed = serve.pid("detok-0")
    os.kill(killed, signal.SIGKILL)
    assert serve.process.stderr is not None
    lines = iter(serve.process.stderr.readline, "")
    assert any("detok-0" in line and "was killed by SIGKILL" in line for line in lines)
    assert any("detok-0" in line and "serves again" in line for line in lines)
    assert serve.pid("detok-0") != killed
    assert serve.process.poll() is None
    (tmp_path / "engine-0.do").write_text("die")
    os.kill(serve.pid("engine-0"), signal.SIGKILL)
    assert any("engine-0" in line and '"given_up": true' in line for line in lines)
    assert any("no engine is left: stopping" in line for line in lines)
    assert serve.end()[0] == 1


def test_a_rolling_restart_on_a_signal(serving) -> None:
    serve = serving("--routers", "2")
    line = serve.ready()
    assert re.search(r"ready: tiny on 127.0.0.1:\d+,127.0.0.1:\d+, 2 routers, 1 engine, 2 detokenizers", line)
    names = ("engine-0", "detok-0", "detok-1", "router-0", "router-1")
    before = [serve.pid(name) for name in names]
    serve.process.send_signal(signal.SIGUSR2)
    assert serve.process.stderr is not None
    assert any("all services have been restarted" in line for line in serve.process.stderr)
    assert not set(before) & {serve.pid(name) for name in names}
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 0


def test_ports_that_do_not_go_together(serving) -> None:
    code, _, err = serving("--metrics-port", "65535").end()
    assert code == 1
    assert err == "error: ports from 65535 on: there are no 4 of them\n"


def test_a_death_at_start_shows_why(serving, tmp_path) -> None:
    (tmp_path / "engine-0.do").write_text("die")
    serve = serving()
    code, out, err = serve.end()
    assert code == 1
    assert out == ""
    assert "Traceback: it broke" in err
    assert err.endswith("error: engine-0 ended with code 3 while starting\n")


def test_interrupt_while_starting(serving, tmp_path) -> None:
    (tmp_path / "router.do").write_text("hang")
    serve = serving()
    assert wait_until((tmp_path / "router.json").exists)
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 130


def test_a_wrong_model_is_one_line(sluice, tmp_path) -> None:
    result = sluice("serve", str(tmp_path / "nothing"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "nothing" in result.stderr
    assert result.stderr.count("\n") == 1

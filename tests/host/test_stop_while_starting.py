"""SIGTERM while a service starts or loads: it exits with status 0, and so do its ranks. Also as process 1."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.tiny_model import path
from tests.fakes.processes import LIMIT, is_alive, wait_until

pytestmark = pytest.mark.process

SECONDS = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Times of the signal after the start, but not before the handler is installed: until then, the kernel drops signals
to process 1."""
UNSHARE = ("unshare", "--pid", "--fork")
ROOT = Path(__file__).parents[2]
BLOCKED = """
import hashlib, pathlib
from sluice.host.process import exit_on_signals
exit_on_signals()
pathlib.Path({marker!r}).touch()
hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
"""
"""A program with one call into a library that takes minutes and that no signal interrupts."""


def command(module: str, folder: Path, *flags: str) -> list[str]:
    peers = ("--engines", f"ipc://{folder}/1", "--detokenizers", f"ipc://{folder}/2", "--port", "0")
    peer_flags = peers if module == "router" else ()
    model = ("--model", str(path()), "--listen", f"ipc://{folder}/inbox")
    return [sys.executable, "-m", module, *model, *peer_flags, *flags]


def start(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment | variables, stderr=subprocess.DEVNULL)


def children(pid: int) -> list[int]:
    pids: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may have ended meanwhile.
        with suppress(OSError):
            pids += map(int, tasks.read_text().split())
    return pids


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1)


def can_unshare() -> bool:
    return (
        shutil.which(UNSHARE[0]) is not None and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    )


@pytest.mark.quick(2)
@pytest.mark.skipif(not can_unshare(), reason="needs the permission to unshare --pid")
@pytest.mark.parametrize("module", ["router", "detok_service", "engine_worker"])
def test_process_1_exits_at_any_time_during_its_start(tmp_path: Path, module: str) -> None:
    started = []
    for seconds in SECONDS:
        (tmp_path / str(seconds)).mkdir()
        started.append((time.monotonic() + seconds, start(*UNSHARE, *command(module, tmp_path / str(seconds)))))
    for at, unshare in started:
        assert wait_until(lambda pid=unshare.pid: bool(children(pid)))
        (process,) = children(unshare.pid)
        time.sleep(max(0.0, at - time.monotonic()))
        assert wait_until(lambda pid=process: catches_sigterm(pid))
        os.kill(process, signal.SIGTERM)
        assert unshare.wait(LIMIT) == 0


@pytest.mark.parametrize("seconds", [1.0, 3.0, 5.0])
def test_ranks_end_with_the_engine(tmp_path: Path, seconds: float) -> None:
    engine = start(*command("engine_worker", tmp_path, "--tensor-parallel", "2", "--threads", "1"))
    time.sleep(seconds)
    assert wait_until(lambda: catches_sigterm(engine.pid))
    ranks = children(engine.pid)
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(LIMIT) == 0
    assert wait_until(lambda: not any(map(is_alive, ranks)))


def test_a_rank_that_waits_for_the_others_ends(tmp_path: Path) -> None:
    """Started by torchrun on another machine than rank 0, which never starts."""
    with socket.create_server(("127.0.0.1", 0)) as unanswered:
        rank_variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unanswered.getsockname()[1])}
        rank = start(*command("engine_worker", tmp_path, "--tensor-parallel", "2"), **rank_variables, **master)
        connection, _ = unanswered.accept()
        with connection:
            rank.terminate()
            assert rank.wait(LIMIT) == 0


def test_a_long_call_into_a_library_does_not_delay_the_exit(tmp_path: Path) -> None:
    marker = tmp_path / "calling"
    process = start(sys.executable, "-c", BLOCKED.format(marker=str(marker)))
    assert wait_until(marker.exists)
    process.terminate()
    assert process.wait(LIMIT) == 0


def test_the_reason_of_the_exit_is_logged(tmp_path: Path) -> None:
    marker = tmp_path / "calling"
    command = [sys.executable, "-c", BLOCKED.format(marker=str(marker))]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert wait_until(marker.exists)
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert [json.loads(line)["event"] for line in log.splitlines()] == ["stopped_while_starting"]
    assert process.returncode == 0


def test_a_signal_to_a_forked_child_does_not_end_the_parent() -> None:
    """Libraries may fork children while a service loads."""
    code = """
from sluice.host.process import exit_on_signals
import os, signal, time
exit_on_signals()
runs, says = os.pipe()
child = os.fork()
if not child:
    os.write(says, b"x")
    time.sleep(60)
os.read(runs, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
time.sleep(0.5)
raise SystemExit(7 if os.waitstatus_to_exitcode(status) == -signal.SIGTERM else 8)
"""
    assert start(sys.executable, "-c", code).wait(60) == 7


def test_a_handler_of_the_service_replaces_the_exit() -> None:
    code = """
from sluice.host.process import exit_on_signals, on_stop_signal
import os, signal, time
exit_on_signals()
stopped = []
on_stop_signal(lambda: stopped.append(1))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
raise SystemExit(7 if stopped else 8)
"""
    assert start(sys.executable, "-c", code).wait(60) == 7

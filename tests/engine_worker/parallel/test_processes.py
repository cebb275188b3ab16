"""The real engine with two ranks: its start, its end, and how the other rank ends if one dies or hangs."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sluice import tiny_model
from tests.fakes.ports import free_ports
from tests.fakes.processes import is_alive, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

RANK_TIMEOUT = 10.0
"""Seconds: short for a stopped rank, but longer than a running rank waits for a core on a busy machine."""
FLAGS = ["--tensor-parallel", "2", "--threads", "1", "--kv-cache-tokens", "4096", "--device", "cpu"]


def start(
    folder: Path, *flags: str, environment: dict[str, str] | None = None, working: Path | None = None
) -> subprocess.Popen[str]:
    """`working`: the working directory."""
    command = [sys.executable, "-m", "engine_worker", "--model", str(tiny_model.path()), *FLAGS, *flags]
    command += ["--listen", f"ipc://{folder}/engine", "--rank-timeout", str(RANK_TIMEOUT)]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}, cwd=working
    )


def until(process: subprocess.Popen[str], event: str) -> dict:
    """The first log line with this event."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{") and json.loads(line)["event"] == event:
            return json.loads(line)
    raise AssertionError(lines)


def children(pid: int) -> list[int]:
    """Process ids of the followers."""
    pids = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        # A child of another kind may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"follower" in Path(f"/proc/{child}/cmdline").read_bytes():
                pids.append(int(child))
    return pids


def shared_files(pid: int) -> set[str]:
    """Files in /dev/shm that the process has open or mapped."""
    process, paths = Path(f"/proc/{pid}"), set()
    for link in (process / "fd").iterdir():
        # The file may be closed meanwhile.
        with suppress(FileNotFoundError):
            paths.add(str(link.readlink()))
    paths |= {line.split()[-1] for line in (process / "maps").read_text().splitlines()}
    return {path for path in paths if path.startswith("/dev/shm/")}


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    process.stderr.close()


@pytest.fixture
def engine(tmp_path):
    process = start(tmp_path)
    yield process
    ended(process)


def test_an_engine_with_two_ranks_starts_and_drains(engine):
    ready = until(engine, "ready")
    assert ready["tensor_parallel"] == "2"
    assert ready["kv_tokens"] == 4096
    (follower,) = children(engine.pid)
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(60) == 0
    assert not is_alive(follower)


@pytest.mark.long
def test_both_ranks_import_the_processors(tmp_path):
    module = "import os\nopen(f'imported-{os.getpid()}', 'w').close()\ndef f(*_): ...\n"
    (tmp_path / "mine.py").write_text(module)
    flags = ("--logits-processors", '{"f": "mine:f"}', "--logits-processor-replicate")
    process = start(tmp_path, *flags, working=tmp_path)
    try:
        until(process, "ready")
        pids = [process.pid, *children(process.pid)]
        assert {path.name for path in tmp_path.glob("imported-*")} == {f"imported-{pid}" for pid in pids}
        assert len(pids) == 2
    finally:
        ended(process)


@pytest.mark.parametrize(
    ("death", "why"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "rank 1 has made no progress for 10 s", marks=pytest.mark.long),
    ],
)
def test_a_rank_is_lost_and_the_engine_ends(engine, death, why):
    """A lost rank is also detected while the engine is idle."""
    until(engine, "ready")
    (follower,) = children(engine.pid)
    os.kill(follower, death)
    assert until(engine, "rank_lost")["error"] == why
    assert engine.wait(60) == 1
    assert wait_until(lambda: not is_alive(follower))


def test_if_the_engine_is_killed_its_ranks_end(engine):
    """Even a rank that is stopped."""
    until(engine, "ready")
    (follower,) = children(engine.pid)
    shared = shared_files(engine.pid) | shared_files(follower)
    os.kill(follower, signal.SIGSTOP)
    engine.kill()
    assert wait_until(lambda: not is_alive(follower))
    assert not [path for path in shared if Path(path).exists()]


def test_a_rank_that_dies_while_it_loads(engine):
    assert wait_until(lambda: bool(children(engine.pid)))
    os.kill(children(engine.pid)[0], signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in until(engine, "rank_lost")["error"]
    assert engine.wait(60) == 1


@pytest.mark.long
def test_a_model_that_cannot_be_split(tmp_path):
    errors = refused(start(tmp_path, "--tensor-parallel", "3"))
    assert "tensor_parallel = 3 does not divide num_attention_heads = 4" in errors


def refused(process) -> str:
    """The error with which the process ended, without a traceback."""
    try:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 1
        assert "Traceback" not in errors
        return errors
    finally:
        process.kill()


def environments() -> list[dict[str, str]]:
    """The environments of two ranks, as torchrun sets them."""
    port = str(free_ports(1))
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**variables, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2)]


@pytest.fixture
def given_ranks(tmp_path):
    """Two ranks, started as by torchrun."""
    ranks = [start(tmp_path, environment=environment) for environment in environments()]
    yield ranks
    for rank in ranks:
        ended(rank)


@pytest.mark.long
def test_started_by_torchrun(given_ranks):
    """Rank 0 serves; the other rank follows over TCP."""
    assert until(given_ranks[0], "ready")["tensor_parallel"] == "2"
    # torchrun forwards its signal to all ranks.
    for rank in reversed(given_ranks):
        rank.send_signal(signal.SIGTERM)
    errors = [rank.communicate(timeout=60)[1] for rank in given_ranks]
    assert [rank.returncode for rank in given_ranks] == [0, 0], errors


@pytest.mark.long
def test_rank_0_of_torchrun_does_not_join(tmp_path):
    errors = refused(start(tmp_path, "--rank-start-timeout", "1", environment=environments()[1]))
    assert "no store at MASTER_ADDR and MASTER_PORT: " in errors


@pytest.mark.long
def test_rank_0_of_torchrun_is_lost(given_ranks):
    first, second = given_ranks
    until(first, "ready")
    first.kill()
    assert "rank 0 has disconnected" in until(second, "leader_lost")["error"]
    assert second.wait(60) == 1

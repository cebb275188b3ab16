"""`python -m engine_worker.keeper`"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_worker.keeper.client import KeeperClient
from sluice.lanes.keys import ROLES, Keys, Security, generate
from tests.engine_worker.keeper.keepers import digests, stored
from tests.engine_worker.pool_files.files import LAYOUT, open_file, store
from tests.fakes.ports import free_ports

pytestmark = pytest.mark.process


@contextmanager
def keeper_process(*flags: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """The process, and what it logs when it is ready."""
    command = [sys.executable, "-m", "engine_worker.keeper", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process, json.loads(process.stderr.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_keeper_serves_engines_of_other_machines(shared_memory: Path, disk_folder: Path, tmp_path: Path) -> None:
    for role in ROLES:
        generate(tmp_path / "keys", role)
    _, file = open_file(shared_memory, "a")
    for number in range(3):
        store(file, number, number)
    port = free_ports(1)
    flags = ["--kv-folder", str(shared_memory), "--listen", "tcp://127.0.0.1:*", "--keys", str(tmp_path / "keys")]
    flags += ["--disk-folder", str(disk_folder), "--disk-bytes", "1GiB", "--metrics-port", str(port)]
    client = KeeperClient(Security(Keys(tmp_path / "keys", "engine")))
    with keeper_process(*flags) as (process, ready):
        assert ready["event"] == "ready"
        address = ready["address"]
        assert client.find(address, LAYOUT, digests([0, 1, 2, 3])) == 3
        received: list[bytes] = []
        assert client.read(address, LAYOUT, digests([0, 1, 2, 3]), lambda *block: not received.append(bytes(block[2])))
        assert received == [bytes(stored(number).data) for number in range(3)]
        assert client.drop(address)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert 'sluice_keeper_blocks_read_total{tier="memory"} 3.0' in page
        assert 'sluice_keeper_questions_total{answer="dropped"} 1.0' in page
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").status == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5
    client.close()


def test_a_killed_keeper_is_a_miss(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 0)
    client = KeeperClient(Security())
    with keeper_process("--kv-folder", str(shared_memory), "--listen", f"ipc://{shared_memory}/keeper") as (process, _):
        address = f"ipc://{shared_memory}/keeper"
        assert client.find(address, LAYOUT, digests([0])) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert client.find(address, LAYOUT, digests([0])) == 0
    client.close()


def test_a_keeper_that_cannot_start_says_why(shared_memory: Path, disk_folder: Path) -> None:
    disk_folder.chmod(0o755)
    with keeper_process("--kv-folder", str(shared_memory), "--disk-folder", str(disk_folder)) as (process, line):
        assert line["event"] == "start_failed"
        assert "disk_folder" in line["error"]
        assert process.wait(10) == 1


def test_a_keeper_whose_disk_fails_serves_from_memory(shared_memory: Path, disk_folder: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 0)
    # A layout whose blocks cannot be listed.
    (disk_folder / "0123456789abcdef").mkdir(mode=0o700)
    (disk_folder / "0123456789abcdef" / f"{'0' * 32}.block").symlink_to(f"{'0' * 32}.block")
    address = f"ipc://{shared_memory}/keeper"
    flags = ["--kv-folder", str(shared_memory), "--listen", address, "--disk-folder", str(disk_folder)]
    client = KeeperClient(Security())
    with keeper_process(*flags, "--disk-bytes", "1GiB") as (_, line):
        assert (line["event"], line["not_done"]) == ("disk_failed", "opened")
        assert client.find(address, LAYOUT, digests([0])) == 1
        assert not client.drop(address)
    client.close()

"""Engines that die while they write to their file."""

import subprocess
import sys
from pathlib import Path

from engine_worker.pool_files.layout import check_of
from engine_worker.pool_files.pool_file import PoolFile
from tests.engine_worker.pool_files.files import content, digest, fill, holds, open_file, pattern, store


def test_an_engine_killed_between_any_two_writes_leaves_no_wrong_block(shared_memory: Path) -> None:
    """Block 0 had content 1, and receives content 2. At each stop the next engine and a living one look at it."""
    for stop in range(8):
        folder = shared_memory / str(stop)
        folder.mkdir(mode=0o700)
        _, file = open_file(folder, "a")
        store(file, 0, 1)
        replace_step_by_step(file, stop)
        view, reader = open_file(folder, "reader")
        reader.reserve(0)
        assert not view.empty
        found = [number for number in (1, 2) if view.copy(digest(number), 0) is not None and holds(reader, 0, number)]
        refused = [number for number in (1, 2) if view.copy(digest(number), 0) is not None]
        assert found == refused
        file.close()
        _, adopted = open_file(folder, "a")
        contents = [content for _, content in adopted.adopted()]
        assert contents == [content(number) for number in (1, 2) if holds(adopted, 0, number)]
        assert contents == ([content(1)] if stop == 0 else [content(2)] if stop >= 6 else [])


def replace_step_by_step(file: PoolFile, stop: int) -> None:
    """The writes of `clear`, of a step and of `put`, the first `stop` of them."""
    total = 0

    def compute_half() -> None:
        file.parts[0][0] = pattern(2, 0)

    def compute() -> None:
        nonlocal total
        fill(file, 0, 2)
        total = file.sum(0)

    def write_entry() -> None:
        parent = content(2).parent
        file._entries[0] = (3, 0, 0, total, digest(2), parent, True, content(2).adapter, content(2).tokens)

    def write_check() -> None:
        file._check[0] = check_of(file._entries[0])

    def write_valid() -> None:
        file._valid[0] = 1

    writes = [lambda: file.clear(0), compute_half, compute, write_entry, write_check, write_valid]
    for write in [*writes, lambda: file._link(0, file._buckets)][:stop]:
        write()


def test_an_engine_killed_at_any_moment_leaves_no_wrong_block(shared_memory: Path) -> None:
    """Killed by the kernel again and again, and restarted with what its predecessor left."""
    command = [sys.executable, "-m", "tests.engine_worker.pool_files.kill_while_storing", str(shared_memory), "60"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout)

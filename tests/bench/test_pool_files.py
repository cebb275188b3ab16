import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness.pool_files import VARIABLE, engine_args, folders, left


def ring(pid: int) -> SimpleNamespace:
    children = {"engine-0": SimpleNamespace(role="engine", pid=pid), "router": SimpleNamespace(role="router", pid=-1)}
    return SimpleNamespace(children=children)


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        (["--default-kv-folder", "/dev/shm/ring"], None, {Path("/dev/shm/ring")}),
        (["--default-kv-folder", "/dev/shm/ring", "--kv-folder", "/dev/shm/own"], None, {Path("/dev/shm/own")}),
        (["--default-kv-folder", "/dev/shm/ring"], "/dev/shm/variable", {Path("/dev/shm/variable")}),
        (["--default-kv-folder", "/dev/shm/ring", "--kv-folder", "none"], None, set()),
        ([], None, set()),
    ],
)
def test_the_folder_is_that_of_the_engines_flags_or_environment(flags, variable, expected):
    environment = {**os.environ, **({} if variable is None else {VARIABLE: variable})}
    program = "print(flush=True); input()"
    command = [sys.executable, "-c", program, *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as engine:
        # Until the program runs, its command line may be that of this process.
        engine.stdout.readline()
        assert folders(ring(engine.pid)) == expected
        engine.communicate(b"\n")


def test_a_folder_and_its_files_are_left_until_they_are_removed(tmp_path):
    folder = tmp_path / "ring"
    assert left([folder]) == []
    file = folder / "layout" / "engine-0.pool"
    file.parent.mkdir(parents=True)
    file.touch()
    assert left([folder]) == [folder, folder / "layout", file]


def test_without_pool_files_the_engines_are_told_so():
    assert engine_args(files=False) == {"kv_folder": "none"}
    assert engine_args(files=True) == {}

"""Services that tests start are forks of a template, and behave as if they had been executed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.tiny_model import path
from tests.forks.processes import Template

pytestmark = pytest.mark.process

HELP = [sys.executable, "-m", "detok_service", "--help"]


def test_a_fork_does_what_an_executed_service_does(tmp_path):
    with subprocess.Popen(HELP, stdout=subprocess.PIPE, cwd=tmp_path) as forked:
        printed = forked.communicate()[0]
    # A variable that an import may read.
    executed = subprocess.run(HELP, stdout=subprocess.PIPE, env={**os.environ, "A_LIBRARY": "1"}, check=True)
    assert (forked.returncode, printed) == (0, executed.stdout)


def test_it_is_a_child_with_its_own_settings_folder_group_and_end(tmp_path):
    command = [sys.executable, "-P", "-m", "detok_service", "--model", str(path()), "--listen", "ipc://detok"]
    environment = {**os.environ, "SLUICE_DETOK_ID": "seven"}
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": environment, "process_group": 0}
    with subprocess.Popen(command, **options) as process:
        try:
            assert '"id": "seven"' in process.stderr.readline()
            assert (tmp_path / "detok").is_socket()
            assert os.getpgid(process.pid) == process.pid
            assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{process.pid}/status").read_text()
            assert b"tests.forks.template" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        finally:
            process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_an_error_ends_it_with_a_status():
    process = subprocess.run([*HELP[:3], "--no-such-flag"], stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 1
    assert "--no-such-flag" in process.stderr


@pytest.mark.parametrize(
    ("command", "variables", "fits"),
    [
        (HELP, {}, True),
        ([HELP[0], "-P", *HELP[1:]], {"SLUICE_LOG_LEVEL": "debug"}, True),
        (HELP, {"PYTHONPATH": "/elsewhere"}, False),
        (HELP, {"OMP_NUM_THREADS": "3"}, False),
        ([HELP[0], "-m", "sluice"], {}, False),
        ([HELP[0], "-c", "pass"], {}, False),
        (["/usr/bin/python3", *HELP[1:]], {}, False),
        (["true"], {}, False),
    ],
)
def test_only_what_equals_a_fork_is_forked(command, variables, fits):
    assert (Template().service(command, {**os.environ, **variables}) is not None) == fits

"""The exit of a service that cannot start."""

import json
import os
import pty
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CODE = """
from sluice.host.process import run_service
def main():
    raise SystemExit({ending!r})
run_service("router", main)
"""


def command(ending: object) -> list[str]:
    return [sys.executable, "-c", CODE.format(ending=ending)]


def test_the_reason_is_a_json_log_line() -> None:
    done = subprocess.run(command("no model"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    line = json.loads(done.stderr)
    assert (line["service"], line["event"], line["level"]) == ("router", "start_failed", "error")
    assert line["error"] == "no model"


def test_a_terminal_shows_plain_text() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(command("no model"), stderr=slave)
    os.close(slave)
    assert os.read(master, 4096).decode().strip() == "python -m router: no model"
    assert process.wait(60) == 1


def test_other_exit_statuses_are_not_changed() -> None:
    for ending in (None, 0, 2):
        done = subprocess.run(command(ending), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (ending or 0, "")


def test_the_interpreter_is_not_taken_down() -> None:
    """A thread that never ends, as of a library or beside a hung disk, and what is run at exit, do not delay it."""
    code = """
import atexit, threading
from sluice.host.process import run_service
atexit.register(print, "taken down")
def main():
    threading.Thread(target=threading.Event().wait).start()
    print("done")
run_service("router", main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.budget import Budget
from bench.gpu.findings import Check, Findings, Skip
from bench.gpu.session import Session

ROOT = Path(__file__).parents[3]
HANGS = """
import sys, time
from pathlib import Path
import torch
from bench.gpu.budget import Budget
from bench.gpu.findings import Findings
from bench.gpu.session import Session

out = Path(sys.argv[1])
session = Session(Findings({}), Budget(0.5), torch.device("cpu"), out, out / "gpu.json")
session.watch(grace=0.5)
session.do("first", 0.1, lambda: "done")
session.do("second", 0.1, lambda: time.sleep(600))
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def session(tmp_path, clock):
    return Session(Findings({}), Budget(10, clock), torch.device("cpu"), tmp_path, tmp_path / "gpu.json")


def raises(error: Exception):
    def task() -> str:
        raise error

    return task


def test_a_task_that_does_not_fit_is_skipped_and_shorter_ones_are_not(session, clock):
    done = []
    clock.now = 8.0
    session.do("long", 3, lambda: str(done.append("long")))
    session.do("short", 1, lambda: str(done.append("short")))
    assert done == ["short"]
    assert session.findings.skipped == {"long": "takes about 3 s, and 2 are left"}


def test_what_cannot_be_done_is_skipped_with_the_reason(session):
    session.do("there", 1, raises(Skip("no such thing")))
    session.do("large", 1, raises(torch.OutOfMemoryError("CUDA out of memory.\nmore")))
    assert session.findings.skipped == {"there": "no such thing", "large": "out of memory: CUDA out of memory."}
    assert session.findings.passed


def test_what_goes_wrong_is_written_down_and_the_rest_is_done(session, tmp_path, capsys):
    session.do("broken", 1, raises(ValueError("no luck")))
    session.do("whole", 1, lambda: "12 GB/s")
    written = Findings.load(tmp_path / "gpu.json")
    assert "no luck" in written.failed["broken"]
    assert not written.passed
    assert "whole: 12 GB/s" in capsys.readouterr().out


def test_a_check_that_does_not_hold_is_no_pass(session):
    session.findings.checks.append(Check("one", True, ""))
    assert session.findings.passed
    session.findings.checks.append(Check("other", False, ""))
    assert not session.findings.passed


def test_a_task_that_does_not_come_back_ends_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "not through" in done.stderr
    assert Findings.load(tmp_path / "gpu.json").failed == {}
    assert "first: done" in done.stdout

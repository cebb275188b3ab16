import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.findings import Check, Findings, Skip
from bench.gpu.session import Budget, GpuSession
from tests.fakes.clock import Clock
from tests.fakes.processes import is_alive, wait_until

ROOT = Path(__file__).parents[3]
HANGS = """
import sys, time
from pathlib import Path
import torch
from bench.gpu.findings import Findings
from bench.gpu.session import Budget, GpuSession

out = Path(sys.argv[1])
# The clock stands still, and the time limit starts with the second task, so both tasks start on any machine.
session = GpuSession(Findings({}), Budget(0.5, lambda: 0.0), torch.device("cpu"), out, out / "gpu.json")
limit = lambda: session.watch(lambda: (out / "page").write_text(str(session.findings)), grace=GRACE)
session.do("first", 0.1, lambda: "done")
session.do("second", 0.1, lambda: [limit(), HANGING])
"""
TASK_HANGS = HANGS.replace("HANGING", "time.sleep(600)").replace("GRACE", "0.5")
CHILD_HANGS = HANGS.replace(
    "HANGING", "session.children.run(['sh', '-c', f'sleep 600 & echo $! $$ > {out}/pids; wait'], 600)"
).replace("GRACE", "10")
PAGE_CANNOT_BE_WRITTEN = TASK_HANGS.replace("write_text(str(session.findings))", "joinpath('no', 'folder').touch()")


@pytest.fixture
def clock():
    return Clock(0.0)


@pytest.fixture
def session(tmp_path, clock):
    return GpuSession(Findings({}), Budget(10, clock), torch.device("cpu"), tmp_path, tmp_path / "gpu.json")


def raises(error: Exception):
    def task() -> str:
        raise error

    return task


def test_a_task_beyond_the_time_budget_is_skipped_and_shorter_ones_run(session, clock):
    done = []
    clock.now = 8.0
    session.do("long", 3, lambda: str(done.append("long")))
    session.do("short", 1, lambda: str(done.append("short")))
    assert done == ["short"]
    assert session.findings.skipped == {"long": "takes about 3 s, and 2 are left"}


def test_a_skipped_required_task_fails_the_run(session, clock):
    session.do("not here", 1, raises(Skip("no such thing")), needed=True)
    assert session.findings.passed
    clock.now = 8.0
    session.do("long", 3, lambda: "", needed=True)
    assert session.findings.failed == {"long": "takes about 3 s, and 2 are left"}
    assert not session.findings.passed


def test_impossible_tasks_are_skipped_with_the_reason(session):
    session.do("there", 1, raises(Skip("no such thing")))
    assert session.findings.skipped == {"there": "no such thing"}
    assert session.findings.passed


def test_a_failed_task_is_recorded_and_the_others_run(session, tmp_path, capsys):
    session.do("broken", 1, raises(ValueError("no luck")))
    session.do("whole", 1, lambda: "12 GB/s")
    written = Findings.load(tmp_path / "gpu.json")
    assert "no luck" in written.failed["broken"]
    assert not written.passed
    assert "whole: 12 GB/s" in capsys.readouterr().out


def test_a_failed_check_fails_the_run(session):
    session.findings.checks.append(Check("one", True, ""))
    assert session.findings.passed
    session.findings.checks.append(Check("other", False, ""))
    assert not session.findings.passed


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.long
@pytest.mark.process
def test_a_hanging_task_ends_the_process_after_the_page_is_written(tmp_path):
    done = run(TASK_HANGS, tmp_path)
    assert done.returncode == 1
    assert "second: did not end within" in done.stderr
    assert "first: done" in done.stdout
    page = (tmp_path / "page").read_text()
    assert "in <lambda>" in page
    assert "after the budget of 0 s" in page


@pytest.mark.long
@pytest.mark.process
def test_children_of_a_task_end_with_the_process(tmp_path):
    assert run(CHILD_HANGS, tmp_path).returncode == 1
    for pid in (tmp_path / "pids").read_text().split():
        assert wait_until(lambda pid=pid: not is_alive(int(pid)))


@pytest.mark.process
def test_the_process_ends_even_if_the_page_cannot_be_written(tmp_path):
    done = run(PAGE_CANNOT_BE_WRITTEN, tmp_path)
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr

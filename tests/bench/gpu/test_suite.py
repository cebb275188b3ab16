"""Reports of tests that pytest runs in a separate process."""

import pytest

from bench.gpu import suite
from bench.gpu.children import Children
from bench.gpu.findings import Check, Skip
from bench.gpu.suite import run_tests

TESTS = """
import os
import pytest

def test_right(record_property):
    record_property("detail", "3 steps")

@pytest.mark.parametrize("title", ["here", "absent"])
def test_kernel_agrees_with_the_reference(title):
    if title == "absent":
        pytest.skip("not installed")

def test_wrong():
    OTHERWISE

def test_last():
    pass
"""
BEFORE = [Check("right", True, "3 steps"), Check("kernel agrees with the reference[here]", True, "")]
ABSENT = {"kernel agrees with the reference[absent]": "not installed"}

pytestmark = pytest.mark.process


def run(folder, otherwise, avoided=()):
    file = folder / "test_it.py"
    file.write_text(TESTS.replace("OTHERWISE", otherwise))
    return run_tests(avoided, Children(folder), 300, [str(file)])


def test_checks_and_skips_are_distinguished(tmp_path):
    checks, skipped = run(tmp_path, "assert False, 'off by 2'")
    assert checks[:2] == BEFORE
    assert (checks[2].name, checks[2].passed) == ("wrong", False)
    assert "off by 2" in checks[2].detail
    assert checks[3:] == [Check("last", True, "")]
    assert skipped == ABSENT


def test_a_crash_is_a_failed_check(tmp_path):
    checks, skipped = run(tmp_path, "os.abort()")
    assert checks[:2] == BEFORE
    assert not checks[2].passed
    assert "ended with status -6" in checks[2].detail
    assert skipped == ABSENT


def test_a_collection_error_is_a_failed_check(tmp_path):
    checks, _ = run_tests((), Children(tmp_path), 300, [str(tmp_path / "test_none.py")])
    assert [check.passed for check in checks] == [False]


def test_without_pytest_tests_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    with pytest.raises(Skip, match="no pytest"):
        run(tmp_path, "pass")


def test_ranks_are_skipped_without_the_packages_that_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr(suite.standins, "installed", lambda: ("msgspec", "structlog"))
    (tmp_path / "test_it.py").write_text(TESTS.replace("OTHERWISE", "pass"))
    checks, skipped = run_tests((), Children(tmp_path), 300, [suite.RANKS, str(tmp_path / "test_it.py")])
    assert [check.name for check in checks] == [*(check.name for check in BEFORE), "wrong", "last"]
    assert skipped == {suite.RANKS: "no msgspec, structlog: ranks communicate by the real ones"} | ABSENT

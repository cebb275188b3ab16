"""Tests of this machine's kernels and GPUs, by pytest in a separate process, with this module as a plugin."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from bench.gpu import standins
from bench.gpu.children import Children
from bench.gpu.children import report as send
from bench.gpu.findings import Check, Skip

KERNELS = "tests/engine_worker/attention/test_on_device.py"
CODES = "tests/engine_worker/layers/test_coded_on_device.py"
RANKS = "tests/engine_worker/parallel/test_two_ranks.py"
# The tests' conftest.py needs packages that may be missing here.
PYTEST = ("pytest", "-q", "-s", "-p", __name__, "-p", "no:cacheprovider", "--noconftest")


def pytest_runtest_logreport(report: Any) -> None:
    """Called by pytest after each phase of a test."""
    if report.when == "call" or not report.passed:
        detail = dict(report.user_properties).get("detail", "")
        if report.skipped:
            detail = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            detail = report.longrepr.reprcrash.message
        print()  # pytest's dots do not end their line.
        send(name=report.nodeid.rpartition("::test_")[2].replace("_", " "), outcome=report.outcome, detail=detail)


def run_tests(
    avoided: Iterable[str], children: Children, seconds: float, files: Sequence[str] = (RANKS, KERNELS, CODES)
) -> tuple[list[Check], dict[str, str]]:
    """The checks, and what was skipped, with the reason. `avoided`: kernels that must not run."""
    if find_spec("pytest") is None:
        raise Skip("no pytest")
    skipped: dict[str, str] = {}
    if missing := standins.installed():
        skipped[RANKS] = f"no {', '.join(missing)}: ranks communicate by the real ones"
    chosen = [file for file in files if file not in skipped]
    left_out = [f"--deselect={KERNELS}::test_kernel_agrees_with_the_reference[{title}]" for title in avoided]
    reports, why = children.run_module([*PYTEST, *chosen, *left_out], seconds)
    skipped |= {one["name"]: one["detail"] for one in reports if one["outcome"] == "skipped"}
    ended = [one for one in reports if one["outcome"] != "skipped"]
    checks = [Check(one["name"], one["outcome"] == "passed", one["detail"]) for one in ended]
    # With status 1 pytest ends after tests that failed.
    if why and (all(check.passed for check in checks) or not why.startswith("ended with status 1:")):
        checks.append(Check("tests", False, why))
    return checks, skipped

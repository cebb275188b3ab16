"""Two ranks against one, in processes of their own."""

from pathlib import Path

import pytest
import torch

from bench.gpu import children, standins
from bench.gpu.checks import ranks
from bench.gpu.children import Children
from bench.gpu.findings import Outcome, Skip
from bench.gpu.scale import tiny_scale
from bench.gpu.shapes import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPTIONS = tiny_scale().options(3, 100, device="cpu", overlap=True)


def check(folder: Path, device: torch.device = CPU) -> Outcome:
    work = ranks.RanksWork(str(tiny().write(folder)), OPTIONS, (1, 3), (4, 30))
    return ranks.check_ranks(work, device, Children(folder))


@pytest.mark.process
@pytest.mark.timeout(200)
def test_two_ranks_are_as_one(tmp_path):
    found = check(tmp_path)
    assert found.passed, found.detail
    assert "graphs: none: the device is a CPU" in found.detail
    assert "ended within 10 s" in found.detail


@pytest.mark.process
def test_a_process_that_ends_before_it_has_compared_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(children.sys, "executable", "false")
    found = check(tmp_path)
    assert not found.passed
    assert "ended with status 1" in found.detail


def test_they_are_skipped_where_they_cannot_be(tmp_path, monkeypatch):
    for count in (1, 0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(Skip, match="GPU"):
            check(tmp_path, CUDA)
    monkeypatch.setattr(standins, "installed", lambda: ("msgspec",))
    with pytest.raises(Skip, match="no msgspec"):
        check(tmp_path)


def said(passed: bool) -> dict[str, object]:
    return {"passed": passed, "detail": "so"}


@pytest.mark.parametrize(
    ("reports", "why", "passed", "told"),
    [
        ([said(True)], "", True, "so"),
        ([said(False)], "ended with status 1: a log", False, "so"),
        ([said(True)], "not through after 150 s: a log", False, "so; not through after 150 s: a log"),
        ([], "ended with status 1: rank_lost", False, "ended with status 1: rank_lost"),
        ([], "", False, "the process ended without a result"),
    ],
)
def test_what_the_process_said_is_judged(reports, why, passed, told):
    found = ranks._judge(reports, why)
    assert (found.passed, found.detail) == (passed, told)

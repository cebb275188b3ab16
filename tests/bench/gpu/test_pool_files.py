"""The check and the measurement of KV blocks in files, with the host pool in the file as on a GPU."""

from collections import namedtuple

import pytest
import torch

from bench.gpu import pool_files
from bench.gpu.findings import Findings
from bench.gpu.measures import COPYING, NOT_COPYING
from bench.gpu.page import goals
from bench.gpu.plan import Plan
from bench.gpu.pool_files import check_copies, engines
from bench.gpu.scale import tiny_scale
from bench.gpu.session import Budget, GpuSession
from bench.gpu.shapes import tiny
from engine_worker.kvcache.saving import SavingTiers
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.runner import load


@pytest.fixture
def plan(tmp_path) -> Plan:
    session = GpuSession(Findings({}), Budget(1000), torch.device("cpu"), tmp_path, tmp_path / "gpu.json")
    return Plan(session, tiny_scale(), new=True)


@pytest.fixture
def findings(plan) -> Findings:
    return plan._findings


@pytest.mark.long
def test_both_run_here(plan, findings, monkeypatch):
    monkeypatch.setattr(load, "file_is_on_host", lambda device: True)
    plan._files(tiny(), tiny())
    assert findings.failed == findings.skipped == {}
    (check,) = findings.checks
    assert check.passed
    assert not check.detail.startswith("0 ")
    assert [one.mode for one in findings.decode] == [NOT_COPYING, COPYING]
    (goal,) = goals(findings)
    assert goal.name == "tiny, batch 4: speed with copies of blocks to a file / without"


@pytest.mark.long
@pytest.mark.slow
def test_wrong_copies_fail_the_check(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(load, "file_is_on_host", lambda device: True)
    copy = PoolFolder.copy

    def copy_wrongly(folder: PoolFolder, digest: bytes, block: int) -> int | None:
        total = copy(folder, digest, block)
        folder._own.parts[0][block] = 63
        return total

    monkeypatch.setattr(PoolFolder, "copy", copy_wrongly)
    options = plan._scale.options(3, 140) | plan._file_options(tiny(), 1000)
    with engines(tiny(), tmp_path, 2, **options) as loaded:
        assert not check_copies(loaded, 3, 70).passed


@pytest.mark.long
@pytest.mark.slow
def test_a_measurement_in_which_nothing_is_copied_fails(plan, findings, monkeypatch):
    monkeypatch.setattr(load, "file_is_on_host", lambda device: True)
    monkeypatch.setattr(SavingTiers, "publish", lambda tiers, block, content: tiers.device.publish(block, content))
    plan._files(tiny(), tiny())
    assert "blocks were copied" in findings.failed["copies to a file, tiny"]
    assert not findings.checks[0].passed


def test_a_container_with_little_shared_memory_is_skipped(plan, findings, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(pool_files.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 1 << 20))
    plan._files(tiny(), tiny())
    assert set(findings.skipped) == {"blocks of other engines, tiny", "copies to a file, tiny"}
    assert "which has 1" in findings.skipped["copies to a file, tiny"]

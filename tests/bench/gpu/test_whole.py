"""`python -m bench.gpu first`, which includes everything that `python -m bench.gpu` does, on a CPU, as on a machine
with only torch, transformers and numba."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import main
from bench.gpu.findings import Findings
from bench.gpu.measures import COPYING, NOT_COPYING
from bench.gpu.page import markdown
from bench.gpu.suite import RANKS
from bench.gpu.trials import subjects
from tests.bench.gpu.without import WITHOUT

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[3]
RUN = """
import runpy
sys.argv[0] = "bench.gpu"
runpy.run_module("bench.gpu", run_name="__main__", alter_sys=True)
"""
TINY = ("first", "--device", "cpu", "--tiny", "--seconds", "400")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, str, Path]:
    folder = tmp_path_factory.mktemp("measured")
    command = [sys.executable, "-c", WITHOUT + RUN, *TINY, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=460)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return Findings.load(folder / "gpu.json"), done.stdout, folder


@pytest.mark.timeout(500)
def test_everything_is_checked_and_measured(run):
    findings, output, _ = run
    assert findings.failed == {}
    assert {check.name.partition(",")[0] for check in findings.checks} == {
        "kernel agrees with the reference[cpu]",
        "greedy = transformers",
        "overlap = none",
        "graphs = eager",
        "no fallback",
        "blocks of other engines",
    }
    assert all(check.passed for check in findings.checks)
    both = ("as served", "temperature 1", "top-p 0.9, peaked", "top-p 0.9, flat")
    copies = {(mode, 4) for mode in (COPYING, NOT_COPYING)}
    assert {(each.mode, each.batch) for each in findings.decode} == {("eager", 1), *product(both, (1, 4)), *copies}
    assert len(findings.decode) == 11
    assert all(each.tokens_per_second > 0 and each.bytes_per_second > 0 for each in findings.decode)
    assert [each.prompts for each in findings.context] == [2]
    joins = {("as served", 1, 5), ("as served", 4, 5), ("eager", 1, 5)}
    assert {(each.mode, each.batch, each.prompt_tokens) for each in findings.joins} == joins
    runners = (("as served", True), ("as served", False), ("top-p 0.9, peaked", True))
    assert {(each.batch, (each.mode, each.overlap)) for each in findings.gaps} == set(product((1, 4), runners))
    assert all(0 < each.idle_seconds < 1 for each in findings.gaps)
    systems = {"Sluice", "transformers, continuous batching"}
    assert {(each.system, each.batch) for each in findings.throughput} == {
        (name, size) for name in systems for size in (1, 4)
    }
    assert findings.rates is not None
    assert findings.facts["compiler"]
    assert {each.kernel: (each.place, each.absent) for each in findings.tried if each.ended != "runs"} == {
        title: ("all", True) for title in subjects() if title != "cpu"
    }
    assert len([each for each in findings.tried if each.ended == "runs"]) == 4
    assert [each.phase for each in findings.memory] == ["weights", "ready", "64 greedy", "64 top-p"]
    assert findings.choices.keys() == {"default path", "tiny"}
    assert (findings.blamed, findings.doing) == ({}, "")
    assert "generation, tiny, as served, batch 4" in output


@pytest.mark.timeout(500)
def test_missing_packages_are_replaced_or_reported(run):
    findings, output, _ = run
    assert findings.origin["stood in for"] == "msgspec, structlog"
    assert findings.skipped["plot"] == "no matplotlib"
    assert "no msgspec, structlog" in findings.skipped[RANKS]
    assert "a CUDA device" in findings.skipped["kernel agrees with the reference[FlashAttention-2]"]
    assert {name for name, why in findings.skipped.items() if why == "not installed"} == {
        f"side by side, tiny: {name}" for name in ("vLLM", "SGLang", "nano-vllm")
    }
    assert "not installed" in output


@pytest.mark.timeout(500)
def test_the_page_matches_the_findings(run):
    findings, _, folder = run
    assert (folder / "gpu.md").read_text(encoding="utf-8") == markdown(findings)


@pytest.mark.timeout(500)
def test_the_picture_can_be_drawn_elsewhere(run):
    findings, _, folder = run
    main(["--draw", "--out", str(folder)])
    assert (folder / "gpu.png").stat().st_size > 10_000
    assert Findings.load(folder / "gpu.json") == findings


def test_a_missing_gpu_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        main(["--out", str(tmp_path)])

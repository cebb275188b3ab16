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
    found, said, _ = run
    assert found.failed == {}
    assert {check.name.partition(",")[0] for check in found.checks} == {
        "kernel agrees with the reference[cpu]",
        "greedy = transformers",
        "overlap = none",
        "graphs = eager",
        "no fallback",
    }
    assert all(check.passed for check in found.checks)
    both = ("as served", "temperature 1", "top-p 0.9, peaked", "top-p 0.9, flat")
    assert {(one.mode, one.batch) for one in found.decode} == {("eager", 1), *product(both, (1, 4))}
    assert len(found.decode) == 9
    assert all(one.tokens_per_second > 0 and one.bytes_per_second > 0 for one in found.decode)
    assert [one.prompts for one in found.context] == [2]
    joins = {("as served", 1, 5), ("as served", 4, 5), ("eager", 1, 5)}
    assert {(one.mode, one.batch, one.prompt_tokens) for one in found.joins} == joins
    runners = (("as served", True), ("as served", False), ("top-p 0.9, peaked", True))
    assert {(one.batch, (one.mode, one.overlap)) for one in found.gaps} == set(product((1, 4), runners))
    assert all(0 < one.idle_seconds < 1 for one in found.gaps)
    systems = {"Sluice", "transformers, continuous batching"}
    assert {(one.system, one.batch) for one in found.throughput} == {
        (name, size) for name in systems for size in (1, 4)
    }
    assert found.rates is not None
    assert found.facts["compiler"]
    assert {one.kernel: (one.place, one.absent) for one in found.tried if one.ended != "runs"} == {
        title: ("all", True) for title in subjects() if title != "cpu"
    }
    assert len([one for one in found.tried if one.ended == "runs"]) == 4
    assert [one.phase for one in found.memory] == ["weights", "ready", "64 greedy", "64 top-p"]
    assert found.choices.keys() == {"default path", "tiny"}
    assert (found.blamed, found.doing) == ({}, "")
    assert "generation, tiny, as served, batch 4" in said


@pytest.mark.timeout(500)
def test_missing_packages_are_replaced_or_reported(run):
    found, said, _ = run
    assert found.origin["stood in for"] == "msgspec, structlog"
    assert found.skipped["plot"] == "no matplotlib"
    assert "no msgspec, structlog" in found.skipped[RANKS]
    assert "a CUDA device" in found.skipped["kernel agrees with the reference[FlashAttention-2]"]
    assert {name for name, why in found.skipped.items() if why == "not installed"} == {
        f"side by side, tiny: {name}" for name in ("vLLM", "SGLang", "nano-vllm")
    }
    assert "not installed" in said


@pytest.mark.timeout(500)
def test_the_page_matches_the_findings(run):
    found, _, folder = run
    assert (folder / "gpu.md").read_text(encoding="utf-8") == markdown(found)


@pytest.mark.timeout(500)
def test_the_picture_can_be_drawn_elsewhere(run):
    found, _, folder = run
    main(["--draw", "--out", str(folder)])
    assert (folder / "gpu.png").stat().st_size > 10_000
    assert Findings.load(folder / "gpu.json") == found


def test_a_missing_gpu_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        main(["--out", str(tmp_path)])

"""How the plan reacts to its findings."""

from types import SimpleNamespace

import pytest
import torch

from bench.gpu import plan
from bench.gpu.findings import Findings, Outcome, Tried
from bench.gpu.page import markdown
from bench.gpu.plan import NO_COMPILER, Plan
from bench.gpu.scale import tiny_scale
from bench.gpu.session import Budget, GpuSession
from bench.gpu.shapes import tiny


@pytest.fixture
def findings():
    return Findings({"command": "python -m bench.gpu first"})


@pytest.fixture
def made(findings, tmp_path):
    session = GpuSession(findings, Budget(1000), torch.device("cpu"), tmp_path, tmp_path / "gpu.json")
    return Plan(session, tiny_scale(), new=True)


def test_without_a_compiler_the_page_has_a_warning(made, findings, monkeypatch):
    monkeypatch.setattr(plan, "missing_compiler", lambda: "Triton needs a C compiler: install gcc")
    made._facts()
    assert findings.notes == [NO_COMPILER]
    assert NO_COMPILER in markdown(findings)


def test_a_crashed_kernel_does_not_run_in_this_process(made, findings, monkeypatch):
    findings.tried.append(Tried("Triton's store", "2 heads", "its process ended with status -11", crashed=True))
    made._avoid()
    avoided = []
    monkeypatch.setattr("bench.gpu.stages.run_tests", lambda titles, *_: avoided.extend(titles) or ([], {}))
    made._tests()
    assert avoided == ["Triton's store"]
    loaded = []
    monkeypatch.setattr(plan.Stages, "_enter", Plan._enter)
    monkeypatch.setattr("bench.gpu.stages.served", lambda shape, folder, **options: loaded.append(options))
    made._runners = SimpleNamespace(enter_context=lambda _: None)
    made._enter("as served", tiny(), 1, overlap=True)
    assert loaded[0]["fused_kernels"] is False
    assert not findings.passed
    assert "crashed its process" in markdown(findings)


def test_the_layer_at_fault_of_a_failed_check_is_searched(made, findings, monkeypatch):
    trials = []

    def again(_recheck, options):
        trials.append(options)
        return Outcome(options == {"cuda_graphs": False}, "")

    monkeypatch.setattr(made, "_again", again)
    made._blaming("graphs = eager", 0, lambda: Outcome(True, ""), _held)
    assert trials == []
    made._blaming("overlap = none", 0, lambda: Outcome(False, ""), _held)
    assert findings.blamed["overlap = none, tiny"].startswith("CUDA graphs; ")
    assert "| overlap = none, tiny | CUDA graphs; " in markdown(findings)


@pytest.mark.slow
def test_quantized_matrices_are_measured_beside_plain_ones_also_those_of_experts(made, findings):
    made.quantized()
    assert findings.passed, findings.failed
    names = [f"tiny{sparse}{method}" for sparse in ("", ", sparse") for method in ("", ", AWQ", ", FP8")]
    assert [(one.shape, one.batch) for one in findings.decode] == [(name, batch) for name in names for batch in (1, 4)]
    assert [one.shape for one in findings.context] == names


@pytest.mark.long
@pytest.mark.slow
def test_the_search_for_the_layer_at_fault_works_on_a_real_runner(made, findings):
    made._blaming("parity", 0, lambda: Outcome(False, ""), _held)
    assert findings.blamed["parity, tiny"].startswith("one of CUDA graphs, overlap, fused kernels, an attention kernel")


def _held(system):
    return Outcome(system.runner.num_blocks > 0, system.runner.choices["attention"])

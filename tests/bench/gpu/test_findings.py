"""Findings as JSON, goals and tables."""

from dataclasses import replace

import pytest

from bench.gpu.findings import Check, Decode, DeviceMemory, Findings, Gaps, PromptRate, Rates, Throughput, Tried
from bench.gpu.page import goals, markdown, tables_of
from bench.gpu.picture import draw
from bench.gpu.shapes import SPARSE

STEP = Decode("Qwen3-8B", "as served", 1, 560, 0.006, 166.0, 2.8e12)
SMALL = replace(STEP, shape="Qwen3-0.6B", step_seconds=0.001)


@pytest.fixture
def findings():
    findings = Findings({"date": "today", "command": "python -m bench.gpu", "device": "a GPU"}, Rates(3.5e12, 7e14))
    findings.checks.append(Check("flash = reference", True, "96 steps | all"))
    findings.decode += [STEP, SMALL, replace(SMALL, mode="eager", step_seconds=0.0016)]
    findings.context.append(PromptRate("Qwen3-8B", 8, 4096, 30000.0, 4.9e14))
    findings.gaps += [
        Gaps("Qwen3-0.6B", "as served", 64, overlap, 2e-3, idle, 1e-4)
        for overlap, idle in ((True, 1e-5), (False, 4e-4))
    ]
    findings.gaps.append(replace(findings.gaps[0], mode="top-p 0.9, peaked", idle_seconds=1e-3))
    findings.throughput += [
        Throughput(name, "Qwen3-8B", 64, 32, 256, rate) for name, rate in (("Sluice", 8000.0), ("vLLM", 7900.0))
    ]
    findings.skipped["plot"] = "no matplotlib"
    findings.facts["compiler"] = "Triton can compile"
    findings.notes.append("**Read this first.**")
    findings.tried.append(Tried("Triton", "4 heads", "its process ended with status -11", crashed=True))
    findings.memory.append(DeviceMemory("ready", 1 << 30, 2 << 30, 3 << 30))
    findings.blamed["graphs = eager"] = "CUDA graphs"
    findings.failed["gaps"] = "Traceback\nValueError: no luck"
    return findings


def test_findings_survive_json(findings, tmp_path):
    findings.save(tmp_path / "gpu.json")
    assert Findings.load(tmp_path / "gpu.json") == findings
    empty = Findings({})
    empty.save(tmp_path / "gpu.json")
    assert Findings.load(tmp_path / "gpu.json") == empty


def test_goals_use_measurements_of_the_same_run(findings):
    assert [(goal.found, goal.met) for goal in goals(findings)] == [
        ("80%", True),
        ("1.01", True),
        ("1.60", True),
        ("98%", True),
    ]


def test_goals_of_quantized_matrices(findings):
    many = replace(STEP, batch=64, tokens_per_second=7000.0)
    awq = replace(STEP, shape="Qwen3-8B, AWQ", bytes_per_second=2.1e12)
    findings.decode += [many, awq, replace(awq, batch=64, tokens_per_second=7700.0)]
    found = {goal.name: goal.found for goal in goals(findings)}
    assert found["Qwen3-8B, AWQ, batch 1: share of the copy's bandwidth"] == "60%"
    assert found["Qwen3-8B, AWQ, batch 64: speed / bfloat16"] == "1.10"


def test_goals_of_experts(findings):
    plain = replace(STEP, shape=SPARSE.name, tokens_per_second=300.0)
    findings.decode += [plain, replace(plain, shape=f"{SPARSE.name}, FP8", tokens_per_second=450.0)]
    found = {goal.name: goal.found for goal in goals(findings)}
    assert found["Qwen3-30B-A3B, 12 layers, FP8, batch 1: speed / bfloat16"] == "1.50"


def test_goals_are_missed(findings):
    findings.rates = Rates(4e12, 7e14)
    findings.throughput.append(Throughput("SGLang", "Qwen3-8B", 64, 32, 256, 8100.0))
    findings.decode[2] = replace(findings.decode[2], step_seconds=0.0014)
    findings.gaps[0] = replace(findings.gaps[0], idle_seconds=1e-4)
    assert [goal.met for goal in goals(findings)] == [False] * 4
    assert "SGLang" in goals(findings)[1].name


def test_goals_with_a_missing_measurement_are_not_reported(findings):
    findings.rates = None
    del findings.decode[2], findings.gaps[1], findings.throughput[1]
    assert goals(findings) == []


def test_tables_contain_all_findings(findings):
    assert [table.title for table in tables_of(findings)] == [
        "The machine",
        "Goals",
        "The device",
        "Kernels",
        "Checks",
        "Layers at fault",
        "Memory of the default path, GiB",
        "Generation, through the engine's loop",
        "Context, through the engine's loop",
        "Gaps between steps",
        "Side by side",
        "Skipped",
        "Failed",
    ]
    for table in tables_of(findings):
        assert all(len(row) == len(table.columns) for row in table.rows)
    page = markdown(findings)
    assert "ValueError: no luck" in page
    assert "| Qwen3-8B, as served | 1 | 560 | 6 | 166 | 2,800 | 80% |" in page
    assert "96 steps / all" in page
    assert "gpu.png" in page
    assert "**Read this first.**" in page
    assert "| Triton | 4 heads | **its process ended with status -11** |" in page
    assert "| ready | 1.00 | 2.00 | 3.00 |" in page
    assert "Incomplete" not in page


def test_an_incomplete_page_names_the_running_task(findings):
    findings.doing = "gaps, tiny"
    assert "Incomplete: *gaps, tiny* was running when this was written." in markdown(findings)


def test_a_crashed_kernel_is_a_failure():
    findings = Findings({}, tried=[Tried("Triton", "all", "is not available: no GPU", absent=True)])
    assert findings.passed
    findings.tried.append(Tried("Triton", "4 heads", "is wrong: it is off by 2"))
    assert not findings.passed


def test_the_plot_can_be_drawn(findings, tmp_path):
    draw(findings).savefig(tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000

"""Trials of kernels in separate processes, and the engine's options without the kernels that crashed."""

import pytest
import torch

from bench.gpu import trials
from bench.gpu.children import Children
from bench.gpu.findings import RUNS, Tried
from bench.gpu.scale import tiny_scale
from bench.gpu.trials import LAYERS, TrialPlace, avoiding, judge, places, subjects, try_in_child
from engine_worker.attention.backend import HeadShape, Refusal, RefusedError

CPU = torch.device("cpu")
PLACE = TrialPlace(HeadShape(2, 1, 16), 32, False, torch.float32, CPU)
GOOD = {"ended": RUNS, "absent": False, "first": 0.5, "fastest": 0.001}


def reports(*places: str, last: str | None = None, **facts) -> list:
    """Reports of a process that passed these kinds of heads and started the last one."""
    lines = [report for place in places for report in ({"begun": place}, {"place": place, **GOOD, **facts})]
    return lines + ([] if last is None else [{"begun": last}])


def test_a_kernel_that_runs():
    assert judge("Triton", reports("a", "b"), "") == [
        Tried("Triton", place, RUNS, first=0.5, fastest=0.001) for place in ("a", "b")
    ]


def test_a_crashed_process_is_reported_with_the_heads_it_crashed_at():
    *before, died = judge("Triton", reports("a", last="b"), "ended with status -11: Segmentation fault")
    assert [tried.ended for tried in before] == [RUNS]
    assert died == Tried("Triton", "b", "its process ended with status -11: Segmentation fault", crashed=True)


def test_an_absent_kernel_is_one_line():
    lines = reports("a", "b", ended="is not available: it needs a CUDA device", absent=True)
    assert judge("Triton", lines, "") == [
        Tried("Triton", "all", "is not available: it needs a CUDA device", absent=True)
    ]


def wrong(place):
    raise RefusedError(Refusal.WRONG, "it is off by 2")


def missing(place):
    raise ModuleNotFoundError("No module named 'flash_attn'")


def broken(place):
    raise RuntimeError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("trial", "ended", "absent"),
    [
        (wrong, "is wrong: it is off by 2", False),
        (missing, "is not available: No module named 'flash_attn'", True),
        (broken, "failed: no kernel image", False),
    ],
)
def test_how_a_trial_ends(trial, ended, absent):
    assert trials.run(trial, PLACE, 20) == {"ended": ended, "absent": absent}


def test_each_place_is_tried_many_times():
    seen = []
    report = trials.run(lambda place: seen.append(place), PLACE, 20)
    assert seen == [PLACE] * 20
    assert (report["ended"], report["absent"]) == (RUNS, False)


@pytest.mark.process
@pytest.mark.timeout(240)
def test_in_a_real_process(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "ROUNDS", 2)
    results = try_in_child("cpu", places(tiny_scale(), torch.float32, CPU), Children(tmp_path), 200)
    assert {result.ended for result in results} == {RUNS}


def test_kernels_of_other_devices_are_not_tried(tmp_path):
    (result,) = try_in_child("Triton", [PLACE], Children(tmp_path), 200)
    assert (result.ended, result.absent) == ("is not available: it needs a CUDA device", True)
    (result,) = try_in_child("cpu", [PLACE._replace(device=torch.device("cuda"))], Children(tmp_path), 200)
    assert (result.ended, result.absent) == ("is not available: it needs a CPU device", True)


@pytest.mark.long
@pytest.mark.process
def test_a_process_that_cannot_start_is_a_crash(tmp_path):
    place = PLACE._replace(device=torch.device("cuda"))
    (result,) = try_in_child("no such kernel", [place], Children(tmp_path), 100)
    assert result.crashed
    assert "KeyError" in result.ended


@pytest.mark.parametrize(
    ("crashed", "options"),
    [
        ((), {}),
        (("Triton's store",), {"fused_kernels": False}),
        ((LAYERS,), {"fused_kernels": False}),
        (("FlashAttention-3",), {"attention": "varlen"}),
        (("FlashAttention-3", "torch's varlen_attn"), {"attention": "triton"}),
        (
            ("FlashAttention-2", "torch's varlen_attn", "Triton", LAYERS),
            {"attention": "reference", "fused_kernels": False},
        ),
    ],
)
def test_crashed_kernels_are_disabled(crashed, options):
    """So are the other kernels of the same setting, because the setting might select the crashed one."""
    tried = [Tried(title, "a", RUNS) for title in subjects()]
    tried += [Tried(title, "b", "its process ended with status -6", crashed=True) for title in crashed]
    assert avoiding(tried) == options


def test_a_wrong_kernel_is_not_used_as_a_substitute():
    tried = [Tried("FlashAttention-2", "a", "its process ended", crashed=True), Tried("torch's varlen_attn", "a", RUNS)]
    tried += [Tried("torch's varlen_attn", "b", "is wrong: it is off by 2"), Tried("Triton", "a", RUNS)]
    assert avoiding(tried) == {"attention": "triton"}

"""Results of failures within a stage."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import stages
from bench.gpu.findings import Findings, Outcome, Skip
from bench.gpu.plan import Plan
from bench.gpu.scale import FULL, tiny_scale
from bench.gpu.session import Budget, GpuSession
from bench.gpu.shapes import LARGE, tiny
from bench.gpu.stages import Stages
from engine_worker.attention.backend import Refusal, RefusedError


@pytest.fixture
def findings():
    return Findings({})


@pytest.fixture
def session(findings, tmp_path):
    return GpuSession(findings, Budget(1000), torch.device("cpu"), tmp_path, tmp_path / "gpu.json")


@pytest.fixture
def made(session):
    return Plan(session, tiny_scale(), new=False)


def raises(error: Exception):
    def task():
        raise error

    return task


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nmore"),
        RefusedError(Refusal.WRONG, "it is off by 2"),
        RuntimeError("an illegal memory access"),
    ],
)
def test_a_check_that_raises_fails(made, findings, error):
    made._check("one", 1, raises(error))
    assert [(check.name, check.passed) for check in findings.checks] == [("one", False)]
    assert str(error).splitlines()[0] in findings.checks[0].detail
    assert "one" in findings.failed
    assert not findings.passed


def test_a_check_that_is_impossible_here_is_skipped(made, findings):
    made._check("one", 1, raises(Skip("not installed")))
    assert findings.skipped == {"one": "not installed"}
    assert findings.checks == []
    assert findings.passed


def test_a_check_for_which_there_is_no_time_has_not_passed(made, findings):
    made._check("one", 1e6, lambda: Outcome(True, ""))
    assert not findings.passed


def test_a_measurement_that_needs_too_much_memory_is_skipped(made, findings):
    made._do("one", 1, raises(torch.OutOfMemoryError("CUDA out of memory.\nmore")))
    made._do("two", 1e6, lambda: "")
    assert findings.skipped["one"] == "out of memory: CUDA out of memory."
    assert findings.passed


def test_an_engine_that_cannot_be_loaded_has_not_passed(made, findings, monkeypatch):
    monkeypatch.setattr(stages, "served", lambda *_, **__: raises(torch.OutOfMemoryError("CUDA out of memory."))())
    made._goals(tiny())
    assert list(findings.failed) == ["tiny, as served"]
    assert not findings.passed


@pytest.mark.slow
def test_no_engine_is_held_while_the_large_one_loads(session, monkeypatch):
    alive: list[int] = []
    engines: list[weakref.ref] = []

    class Engine(SimpleNamespace):
        pass

    @contextmanager
    def served(shape, folder, **options):
        gc.collect()
        alive.append(sum(engine() is not None for engine in engines))
        runner = Engine(
            choices={"device": "cpu", "attention": "cpu", "fused": "no", "cuda_graphs": "none"}, overlap=True
        )
        engines.append(weakref.ref(runner))
        yield Engine(shape=shape, runner=runner)

    monkeypatch.setattr(stages, "served", served)
    made = Plan(session, replace(tiny_scale(), large=tiny()), new=False)
    for name in ("_record", "_rates", "_files", "_tests", "_peers"):
        monkeypatch.setattr(made, name, lambda *_: "")
    made.run()
    assert alive == [0, 1, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("gibibytes", "fits"), [(79, True), (48, False)])
def test_a_shape_that_exceeds_the_memory_is_skipped(session, findings, monkeypatch, gibibytes, fits):
    properties = SimpleNamespace(total_memory=gibibytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    session.device = torch.device("cuda")
    assert Stages(session, FULL)._fitting(LARGE) == (LARGE if fits else None)
    assert findings.skipped == ({} if fits else {"Qwen3-8B": "needs 54 GiB, and this GPU has 48"})

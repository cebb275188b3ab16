"""Detects, before anything is compiled, whether Triton can compile here."""

import pytest
import torch

from engine_worker.runner import fusing, load
from engine_worker.runner.config import RunnerConfig


@pytest.fixture
def equipped(monkeypatch, tmp_path):
    """A machine with a compiler and headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(fusing.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(fusing.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return monkeypatch


def test_nothing_is_missing(equipped):
    assert fusing.missing_compiler() is None


def test_without_a_compiler(equipped):
    equipped.setattr(fusing.shutil, "which", lambda name: None)
    problem = fusing.missing_compiler()
    assert problem is not None
    assert problem.startswith("Triton needs a C compiler (gcc, clang or the variable CC): install gcc and python3-dev")
    equipped.setenv("CC", "/opt/cc")
    assert fusing.missing_compiler() is None


def test_without_headers(equipped, tmp_path):
    (tmp_path / "Python.h").unlink()
    problem = fusing.missing_compiler()
    assert problem is not None
    assert f"Python's headers ({tmp_path}/Python.h)" in problem
    assert "\n" not in problem


def test_an_engine_on_a_gpu_warns_once_before_the_kernel_tests(monkeypatch):
    warned, gpu = [], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for absent in ("Triton needs a C compiler", None):
        monkeypatch.setattr(load, "missing_compiler", lambda absent=absent: absent)
        load._use_device(gpu, RunnerConfig(), lambda event, why: warned.append((event, why)))
    assert warned == [("compiler_not_found", "Triton needs a C compiler")]

"""Whether Triton can compile here, known before anything is compiled."""

import pytest

from engine_worker.runner import compiler, load


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One with a compiler and headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return monkeypatch


def test_nothing_is_missing(machine):
    assert compiler.missing() is None


def test_without_a_compiler(machine):
    machine.setattr(compiler.shutil, "which", lambda name: None)
    found = compiler.missing()
    assert found is not None
    assert found.startswith("Triton misses a C compiler (gcc, clang or the variable CC): install gcc and python3-dev")
    machine.setenv("CC", "/opt/cc")
    assert compiler.missing() is None


def test_without_headers(machine, tmp_path):
    (tmp_path / "Python.h").unlink()
    found = compiler.missing()
    assert found is not None
    assert f"Python's headers ({tmp_path}/Python.h)" in found
    assert "\n" not in found


def test_a_gpu_engine_warns_of_it_once_before_its_trials(monkeypatch):
    warned = []
    for absent in ("Triton misses a C compiler", None):
        monkeypatch.setattr(compiler, "missing", lambda absent=absent: absent)
        load._check_compiler(lambda event, why: warned.append((event, why)))
    assert warned == [("no_compiler", "Triton misses a C compiler")]

import pytest
import torch

from engine_worker.runner import machine
from engine_worker.runner.machine import free_memory

CPU = torch.device("cpu")


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Writes the files of a control group."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text + "\n")

    return write


def test_this_machine():
    assert free_memory(CPU) > 1 << 20


def test_without_a_limit_the_machine_counts(container):
    container(memory_max="max", memory_current="1000")
    assert free_memory(CPU) > 1 << 20


def test_a_containers_limits_count(container):
    container(memory_max="5000", memory_current="1000")
    assert free_memory(CPU) == 4000
    container(memory_max="5000", memory_current="6000")
    assert free_memory(CPU) == 0

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Arguments of a ring of stand-in services that write notes to tmp_path."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    services = ROOT / "tests" / "fakes" / "services.py"
    return {"python": (sys.executable, str(services), str(tmp_path)), "start_timeout": 60}


@pytest.fixture
def notes(tmp_path):
    """Reads the note that a stand-in wrote at its start, by name."""
    return lambda name: json.loads((tmp_path / f"{name}.json").read_text())


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Installs a fake nvidia-smi first in PATH, which lists these GPUs, or fails with a status."""

    def install(*gpus: int, status: int = 0) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        lines = "".join(f"{gpu}\n" for gpu in gpus)
        program = folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\n[ "$*" = "--query-gpu=index --format=csv,noheader" ] || exit 9\n'
            f"printf '{lines}'\nexit {status}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Arguments of a ring of stand-ins that keep notes in tmp_path."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    services = ROOT / "tests" / "fakes" / "services.py"
    return {"python": (sys.executable, str(services), str(tmp_path)), "start_timeout": 60}


@pytest.fixture
def notes(tmp_path):
    """What a stand-in noted at its start, by name."""
    return lambda name: json.loads((tmp_path / f"{name}.json").read_text())

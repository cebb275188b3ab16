"""The command of the soak test, for a few seconds and one death."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.page import load

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_soak_succeeds_and_writes_its_report(tmp_path):
    options = ["--minutes", "0.1", "--every", "6", "--streams", "6", "--threads", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "bench.soak", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = load(tmp_path)["soak"].result
    assert len(result.deaths) == 1
    assert f"1 deaths: {result.streams} streams, 0 failed, 0 wrong" in done.stdout
    assert {trail.role for trail in result.memory} == {"router", "engine", "detok"}
    assert len({trail.service for trail in result.memory}) == 7
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert "## Soak" in (tmp_path / "README.md").read_text(encoding="utf-8")

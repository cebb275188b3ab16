"""`python -m bench.gpu` runs this test too, on machines with two GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SECONDS = 280.0


@pytest.mark.process
@pytest.mark.timeout(300)
def test_two_ranks_compute_the_same_as_one(tmp_path, record_property):
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    command = [sys.executable, "-m", "tests.engine_worker.parallel.two_ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "ended within 60 s" in done.stdout
    record_property("detail", done.stdout.strip())

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_compute_peft_s_tokens(tmp_path):
    command = [sys.executable, "-m", "tests.engine_worker.lora.two_ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "difference" in done.stdout

"""`sluice bench` measures a real ring."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_results_describe_the_requests(ring, tmp_path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "sluice", "bench", ring.address, "--requests", "12", "--concurrency", "4"]
    command += ["--prompt-tokens", "60", "--output-tokens", "16", "--json", str(file), "--detailed"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment)
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "tiny")
    assert result["output_lens"] == [16] * 12
    # The number of tokens per word, measured with the first request, varies.
    assert result["input_lens"] == [pytest.approx(60, rel=0.35)] * 12
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
    assert result["median_itl_ms"] > 0
    assert result["max_concurrent_requests"] <= 4
    assert f"tiny at {ring.address}: 12 requests in" in shown.stdout

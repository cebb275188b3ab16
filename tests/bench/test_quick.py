import subprocess
import sys
from pathlib import Path

import pytest

from bench.catalog import PARTS, load

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_quick_bench_measures_every_part_and_writes_everything(tmp_path):
    command = [sys.executable, "-m", "bench", "--quick", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = load(tmp_path)
    assert list(measured) == list(PARTS)
    for part in PARTS:
        assert (tmp_path / f"{part}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "README.md").is_file()

    (points,) = measured["ring"].result.models
    for point in points.points:
        assert point.alone.tokens_per_second > 0
        assert point.ring.cpu_per_token.keys() == {"router", "engine", "detok", "client"}
        assert point.ring.tokens_per_delta >= 1
    batching = measured["batching"].result
    assert len(batching.static_lives) == len(batching.in_flight_lives) == batching.requests
    assert all(0 < point.cached_tokens < point.prompt_tokens for point in measured["prefix"].result.points)
    for table in measured["peers"].result.tables:
        assert [entry.same for entry in table.entries] == [table.work.requests] * len(table.entries)

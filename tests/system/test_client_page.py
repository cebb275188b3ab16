"""The examples in docs/reference/client.md work as documented."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.long
def test_the_examples(ring) -> None:
    page = (ROOT / "docs" / "reference" / "client.md").read_text(encoding="utf-8")
    first, options = (_run(code, ring.address) for code in BLOCK.findall(page))
    assert "Usage(" in first
    assert first.splitlines()[-1] == "spec.sampling.temperature is 9, must be in [0, 2]"
    lines = options.splitlines()
    assert [line[0] for line in lines if re.match(r"\d ", line)] == ["0", "1", "2"]
    for line in lines:
        # The token, and the two most likely ones.
        assert re.match(r"\d ", line) or len(re.findall(r"-\d+\.\d+|-?0\.0\b", line)) == 3, line


def _run(code: str, address: str) -> str:
    assert code.count("localhost:50051") == 1
    return subprocess.run(
        [sys.executable, "-c", code.replace("localhost:50051", address)],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout

"""The examples, each with a ring of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "trtllm"

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def run(name: str) -> list[str]:
    command, environment = [sys.executable, str(EXAMPLES / name)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_executor() -> None:
    lines = run("executor.py")
    responses = [[line for line in lines if line.startswith(f"request {number}: ")] for number in (1, 2, 3)]
    # A response per token of the stream, one of the whole request, one of both beams.
    assert list(map(len, responses)) == [8, 1, 1]
    assert responses[2][0].count("[1, 2, 3, 4, ") == 2


def test_llm() -> None:
    first, second, parts = run("llm.py")
    assert len({first, second}) == 2
    assert int(parts.removesuffix(" parts")) > 1

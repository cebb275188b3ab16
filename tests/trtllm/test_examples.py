"""The examples, each with a real ring."""

import ast
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "trtllm"

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def run(name: str, *flags: str) -> list[str]:
    command, environment = [sys.executable, name, *flags], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.long
def test_the_executor() -> None:
    lines = run("executor.py")
    responses = [[line for line in lines if line.startswith(f"request {number}: ")] for number in (1, 2, 3)]
    # One response per token of the stream, one for the request without streaming, one for both beams.
    assert list(map(len, responses)) == [8, 1, 1]
    assert responses[2][0].count("[1, 2, 3, 4, ") == 2


def test_llm() -> None:
    first, second, parts = run("llm.py")
    assert len({first, second}) == 2
    # Up to one part for each of 32 tokens and one for the end. A slow reader gets several as one part.
    assert 1 <= int(parts.removesuffix(" parts")) <= 33


@pytest.mark.long
def test_a_closure() -> None:
    *lines, calls = run("closure.py")
    check_digits(lines)
    num_calls = ast.literal_eval(calls.removeprefix("calls: "))
    # An overlapped step may have called it once more.
    assert num_calls.keys() == {0, 1}
    assert all(count >= 6 for count in num_calls.values())


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--batched",)])
def test_logits_processors(flags: tuple[str, ...]) -> None:
    check_digits(run("logits_processor.py", *flags))


def check_digits(lines: list[str]) -> None:
    assert len(lines) == 2
    for prompt in ("year = ", "size = 1"):
        (line,) = (line for line in lines if line.startswith(prompt))
        digits = line.removeprefix(prompt)
        assert len(digits) == 6
        assert digits.isdecimal()
        assert all(digit != next_digit for digit, next_digit in pairwise(digits))

"""The executor's examples, with a ring that they start and with a running one. No process or file may be left over."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "executor"
MARK = "SLUICE_TEST_MARK"
LIMIT = 280.0
"""Timeout in seconds of a program that starts a ring, generous enough for a busy machine."""


def check_batch(out: str, count: int = 64) -> None:
    lines = out.splitlines()
    assert [line.startswith(f"def method_{i}(self") for i, line in enumerate(lines[:count])] == [True] * count
    assert len(lines) == count + 1
    assert re.fullmatch(r"request \d+: spec\.sampling\.temperature: is 9, must be in \[0, 2\]", lines[-1])


def check_async_generate(out: str) -> None:
    assert out.count("\n---\n") == 4
    assert out.startswith("import os\n")


def check_streaming(out: str) -> None:
    assert out.startswith("def fibonacci(n):")
    assert re.search(r"^--- \d+ tokens, ended by (length|stop)$", out, re.MULTILINE)
    assert re.search(r"^1: '", out, re.MULTILINE)


def check_timeout_and_abort(out: str) -> None:
    lines = out.splitlines()
    assert lines[:2] == ["request 1 did not end within 0.01 s", "aborted: True, ended by cancelled"]
    assert lines[2].startswith("cancelled after 8 tokens or a few more")
    assert lines[3] == "ended by timeout"


def check_await_responses(out: str) -> None:
    expected = {f"client {100 + i}, sequence {j}" for i in range(3) for j in range(2)}
    assert {line.partition(":")[0] for line in out.splitlines()} == expected


def check_monitoring(out: str) -> None:
    step = r"^engine-0 step \d+: [\d.]+ ms, \d+ requests in context phase, \d+ in generation phase"
    assert re.search(step, out, re.MULTILINE)
    assert re.search(r'^\d+ steps so far; the last one as JSON: {"engine_id": "engine-0"', out, re.MULTILINE)
    assert len(re.findall(r"^request \d+: queued", out, re.MULTILINE)) == 8


def check_draft_model(out: str) -> None:
    lines = out.splitlines()
    assert lines[:2] == ["the same text: True"] * 2
    counts = [re.fullmatch(r"request \d+: (\d+) of (\d+) drafted tokens were accepted", line) for line in lines[2:]]
    assert [int(match[1]) <= int(match[2]) for match in counts] == [True] * 2


CHECKS: dict[str, Callable[[str], None]] = {
    "batch": check_batch,
    "async_generate": check_async_generate,
    "streaming": check_streaming,
    "timeout_and_abort": check_timeout_and_abort,
    "await_responses": check_await_responses,
    "monitoring": check_monitoring,
    "draft_model": check_draft_model,
}


class Program:
    """A Python program whose processes, including all descendants, are found by a mark in their environment."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.temp = Path(tempfile.mkdtemp(prefix="x", dir="/tmp"))

    def start(self, *command: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, "TMPDIR": str(self.temp)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *command], env=environment, process_group=0, **pipes)

    def processes(self) -> list[int]:
        """Process ids of all running processes of the program."""
        marked = f"{MARK}={self.mark}".encode()
        return [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/environ") if marked in read(file)]

    def assert_nothing_is_left(self) -> None:
        assert self.processes() == []
        assert list(self.temp.iterdir()) == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    for pid in program.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(program.temp)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CHECKS)
def test_examples_run_with_a_running_ring(ring, program, name) -> None:
    process = program.start(str(EXAMPLES / f"{name}.py"), "--address", ring.address)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    CHECKS[name](out)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "streaming",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("monitoring", "timeout_and_abort", "draft_model")),
    ],
)
def test_examples_start_a_ring_and_leave_nothing(program, name) -> None:
    process = program.start(str(EXAMPLES / f"{name}.py"))
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    CHECKS[name](out)
    program.assert_nothing_is_left()


@pytest.mark.long
def test_500_prompts_show_progress_and_leave_nothing(program) -> None:
    process = program.start(str(EXAMPLES / "batch.py"), "--prompts", "500")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert "500/500" in err
    check_batch(out, 500)
    program.assert_nothing_is_left()


LEAVES_CONTEXT = """
from sluice.executor import GenerationExecutor, SamplingParams
params = SamplingParams(max_tokens=64, ignore_eos=True)
with GenerationExecutor.create() as executor:
    results = [executor.generate_async(f"def f{i}(", params, streaming=i % 2 == 0) for i in range(8)]
print([result.result().outputs[0].length for result in results])
"""


@pytest.mark.long
def test_leaving_the_context_waits_for_running_requests(program) -> None:
    process = program.start("-c", LEAVES_CONTEXT)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (0, f"{[64] * 8}\n"), err
    program.assert_nothing_is_left()


INTERRUPTED = """
import threading
from sluice.executor import GenerationExecutor, SamplingParams
with GenerationExecutor.create() as executor:
    submit = executor._submit
    def report(request, *arguments, **options):
        result = submit(request, *arguments, **options)
        if result.request_id == 300:
            print("ready", flush=True)
        return result
    executor._submit = report
    executor.generate([f"def f{i}(" for i in range(500)], SamplingParams(max_tokens=64, ignore_eos=True))
"""


@pytest.mark.long
def test_ctrl_c_in_the_middle_of_500_prompts_leaves_nothing(program) -> None:
    process = program.start("-c", INTERRUPTED)
    assert process.stdout.readline() == "ready\n"
    assert len(program.processes()) == 5
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in err.splitlines()
    assert process.returncode != 0
    program.assert_nothing_is_left()

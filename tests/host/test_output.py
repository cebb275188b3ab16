"""Log lines that cannot be written: full disk, closed or blocked pipe, no stderr, values that cannot be rendered."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.host.output import SafeStream
from tests.fakes.processes import LIMIT

LINES = 20_000
"""More than fits in a pipe and the queue."""
PIPE_BYTES = 1 << 20
"""More than fits in a pipe."""
CODE = """
import logging, os, sys, threading, warnings
from sluice.telemetry.logs import configure
from sluice.host.output import protect_stderr
stderr = protect_stderr()
log = configure("service")
class Bad:
    def __repr__(self):
        raise ValueError("canary")
def fail():
    raise RuntimeError("in a thread")
for i in range(int(sys.argv[1])):
    log.info("line", number=i)
log.error("bad", value=Bad(), request_id="r1")
logging.getLogger("library").warning("from logging")
warnings.warn("from warnings")
print("printed", file=sys.stderr, flush=True)
thread = threading.Thread(target=fail)
thread.start()
thread.join()
stderr.drain(float(sys.argv[2]))
print(stderr.lost, flush=True)
"""


def start(stderr, *arguments, shell=""):
    command = [sys.executable, "-W", "always", "-c", CODE, *map(str, arguments)]
    if shell:
        command = ["sh", "-c", f'exec "$0" "$@" {shell}', *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=Path(__file__).parents[2])


@pytest.mark.process
def test_everything_that_goes_to_stderr_is_written():
    child = start(subprocess.PIPE, 2, LIMIT)
    out, err = child.communicate(timeout=LIMIT)
    assert child.returncode == 0
    assert int(out) == 0
    text = err.decode()
    logged = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["event"] for line in logged] == ["line", "line", "bad"]
    bad = logged[2]
    assert (bad["request_id"], bad["unrendered"], bad["render_error"]) == ("r1", "value", "ValueError")
    assert "canary" not in text
    for part in ("from logging", "from warnings", "printed\n", "RuntimeError: in a thread"):
        assert part in text


@pytest.mark.process
def test_a_full_disk_and_a_closed_descriptor_lose_lines_and_nothing_else():
    with open("/dev/full", "wb") as full:
        child = start(full, 100, LIMIT)
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0
    assert int(out) >= 104
    child = start(None, 100, LIMIT, shell="2>&-")
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0
    assert int(out) >= 104


@pytest.mark.process
def test_a_closed_pipe_loses_lines_and_nothing_else():
    reader, writer = os.pipe()
    os.close(reader)
    child = start(writer, 100, LIMIT)
    os.close(writer)
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0
    assert int(out) >= 104


@pytest.mark.process
def test_a_pipe_that_is_not_read_does_not_block_the_process():
    reader, writer = os.pipe()
    child = start(writer, LINES, 0.0)
    os.close(writer)
    try:
        # The process ends although its lines are not read.
        out, _ = child.communicate(timeout=LIMIT)
        assert child.returncode == 0
        lost = int(out)
        assert 0 < lost < LINES
        written = os.fdopen(reader, "rb").read().splitlines()
        reader = None
        assert json.loads(written[0])["number"] == 0
    finally:
        child.kill()
        if reader is not None:
            os.close(reader)


@pytest.mark.process
def test_descriptors_of_closed_standard_streams_are_opened_on_the_null_device():
    code = (
        "import os\nfrom sluice.host.output import protect_stderr\nprotect_stderr()\n"
        "print([os.path.samefile(f'/proc/self/fd/{number}', os.devnull) for number in (0, 2)])"
    )
    command = ["sh", "-c", 'exec "$0" "$@" <&- 2>&-', sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[True, True]"


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source, os.fdopen(writer, "wb", 0) as sink:
        yield source, sink


def test_when_a_pipe_is_read_again_one_line_reports_the_number_of_lost_lines(pipe):
    source, sink = pipe
    stream = SafeStream(sink, max_queued=8)
    stream.notice = "{} lost".format
    stream.write("x" * PIPE_BYTES + "\n")
    # The writing thread now waits for a reader.
    for i in range(100):
        stream.write(f"{i}\n")
    lost = stream.lost
    assert lost >= 100 - 8
    read = [source.readline() for _ in range(100 - lost + 2)]
    assert read[1:] == [*(f"{i}\n".encode() for i in range(100 - lost)), f"{lost} lost\n".encode()]
    stream.write("after\n")
    assert stream.drain(LIMIT)
    assert source.readline() == b"after\n"


@pytest.mark.process
def test_after_a_full_disk_the_next_line_begins_at_the_start_of_a_line(tmp_path):
    """RLIMIT_FSIZE simulates the full disk: it cuts off a line, and is raised afterwards."""
    code = f"""
import resource, sys
from sluice.host.output import protect_stderr
stderr = protect_stderr()
stderr.notice = "{{}} lost".format
resource.setrlimit(resource.RLIMIT_FSIZE, (15, resource.RLIM_INFINITY))
for line in ("first line", "torn line", "lost line"):
    print(line, file=sys.stderr)
    assert stderr.drain({LIMIT})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("last line", file=sys.stderr)
"""
    with open(tmp_path / "log", "wb") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "log").read_text() == "first line\ntorn\nlast line\n2 lost\n"


def test_no_lines_are_lost_if_the_descriptor_is_non_blocking(pipe):
    source, sink = pipe
    os.set_blocking(sink.fileno(), False)
    stream = SafeStream(sink)
    expected = [f"line {i:<1000}\n".encode() for i in range(1000)]
    for line in expected:
        stream.write(line.decode())
    assert [source.readline() for _ in expected] == expected
    assert stream.lost == 0


def test_text_without_a_newline_is_written_at_a_flush(pipe):
    source, sink = pipe
    stream = SafeStream(sink)
    print("a", "b", end="", file=stream)
    print("\udc80", file=stream)
    print("c", end="", file=stream, flush=True)
    assert stream.drain(LIMIT)
    assert source.read1() == b"a b\\udc80\nc"
    with suppress(BlockingIOError):
        os.set_blocking(source.fileno(), False)
        assert not source.read1()

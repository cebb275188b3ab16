"""Log lines that cannot be written: full disk, closed or blocked pipe, no stderr, values that cannot be rendered."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.telemetry.output import SafeStream
from tests.fakes.processes import LIMIT

LINES = 20_000
"""More than a pipe and the queue hold."""
PIPE_BYTES = 1 << 20
"""More than a pipe holds."""
CODE = """
import logging, os, sys, threading, warnings
from sluice import telemetry
from sluice.telemetry.output import protect_stderr
stderr = protect_stderr()
log = telemetry.configure("service")
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
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["event"] for line in found] == ["line", "line", "bad"]
    assert (found[2]["request_id"], found[2]["unrendered"], found[2]["render_error"]) == ("r1", "value", "ValueError")
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
def test_a_pipe_that_is_not_read_makes_nobody_wait():
    reader, writer = os.pipe()
    child = start(writer, LINES, 0.0)
    os.close(writer)
    try:
        # It comes to its end while its lines are not read.
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
def test_no_descriptor_of_a_closed_standard_stream_is_given_to_others():
    code = (
        "import os\nfrom sluice.telemetry.output import protect_stderr\nprotect_stderr()\n"
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


def test_once_it_is_read_again_one_line_says_how_many_were_lost(pipe):
    source, sink = pipe
    stream = SafeStream(sink, max_queued=8)
    stream.notice = "{} lost".format
    stream.write("x" * PIPE_BYTES + "\n")
    # From here on its thread waits for a reader.
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
    """RLIMIT_FSIZE stands in for the disk: it tears a line, and is raised afterwards."""
    code = f"""
import resource, sys
from sluice.telemetry.output import protect_stderr
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


def test_a_descriptor_that_others_made_non_blocking_loses_nothing(pipe):
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

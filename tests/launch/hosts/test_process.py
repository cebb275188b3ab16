"""A child process: its log lines and its exit."""

import os
import signal
import sys
import threading
import time

import pytest

from sluice.launch import LogLine
from sluice.launch.hosts.process import MAX_LINE_BYTES, ChildProcess
from tests.fakes.processes import LIMIT, is_alive

pytestmark = pytest.mark.process


def test_the_last_lines_are_read_before_the_end_is_reported() -> None:
    seen: list[LogLine | None] = []
    ended = threading.Event()
    code = "import os; [print(i, flush=True) for i in range(1000)]; os.write(1, b'no newline'); os._exit(4)"

    def end(child: ChildProcess) -> None:
        seen.append(None)
        ended.set()

    child = ChildProcess("x", "engine", [sys.executable, "-c", code], os.environ, seen.append, end)
    assert ended.wait(LIMIT)
    assert seen[-1] is None
    assert [line.text for line in seen[-3:-1] if line] == ["999", "no newline"]
    assert len(seen) == 1002
    assert child.ending == "ended with code 4"
    assert child.tail[-1] == "no newline"


def test_a_slow_observer_receives_the_last_lines_before_the_end() -> None:
    """The observer may be slow because the machine is busy."""
    seen: list[str | None] = []
    ended = threading.Event()

    def observe(line: LogLine) -> None:
        time.sleep(1.5)
        seen.append(line.text)

    def end(child: ChildProcess) -> None:
        seen.append(None)
        ended.set()

    ChildProcess("x", "engine", [sys.executable, "-c", "print('why'); print('so')"], os.environ, observe, end)
    assert ended.wait(LIMIT)
    assert seen == ["why", "so", None]


def test_a_long_line_is_split() -> None:
    seen: list[str] = []
    ended = threading.Event()
    code = f"print('a' * {3 * MAX_LINE_BYTES}); print('b')"
    command = [sys.executable, "-c", code]
    ChildProcess("x", "engine", command, os.environ, lambda line: seen.append(line.text), lambda _: ended.set())
    assert ended.wait(LIMIT)
    assert "".join(seen[:-1]) == "a" * 3 * MAX_LINE_BYTES
    assert max(map(len, seen)) < 2 * MAX_LINE_BYTES
    assert seen[-1] == "b"


def test_a_grandchild_that_keeps_the_log_open_does_not_hide_the_end() -> None:
    ended = threading.Event()
    lines: list[LogLine] = []
    sleep = "import time; time.sleep(600)"
    code = f"import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid)"
    child = ChildProcess("x", "engine", [sys.executable, "-c", code], os.environ, lines.append, lambda _: ended.set())
    try:
        assert ended.wait(LIMIT)
        assert not child.alive
        assert child.wait(LIMIT)
        assert is_alive(int(lines[0].text))
    finally:
        os.kill(int(lines[0].text), signal.SIGKILL)

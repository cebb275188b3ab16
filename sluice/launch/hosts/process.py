"""A service as a child process, with threads that read its log and wait for its exit."""

import os
import selectors
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

from sluice.host.process import PARENT_VARIABLE
from sluice.launch.hosts.hosts import TAIL_LINES
from sluice.launch.logs import Observe, parse_line

MAX_LINE_BYTES = 1 << 16
"""A longer line is split, so that a service that never writes a newline does not fill the launcher's memory."""
SILENCE_SECONDS = 0.5
"""Interval at which to check whether a silent process has exited. A surviving grandchild may keep its pipe open."""
LAST_LINES_SECONDS = 10.0
"""Time for the last lines of an exited process to be observed. Bounded because an observer may block."""


class ChildProcess:
    """A `Child` on this machine. One thread passes its log lines to `observe`, another calls `ended` after its exit.

    The process dies with the thread that started it (see `die_with_parent`). Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        name: str,
        role: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        observe: Observe,
        ended: Callable[["ChildProcess"], None],
        files: Sequence[int] = (),
    ) -> None:
        """`files`: descriptors that the process inherits."""
        self.name = name
        self.role = role
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.error = ""
        self._observe = observe
        self._ended = ended
        # In a separate process group, so that Ctrl-C in the terminal reaches only the launcher, which drains in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, PARENT_VARIABLE: str(os.getpid())},
            process_group=0,
            pass_fds=files,
        )
        self._exited = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name=f"end of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        code = self._process.poll()
        if code is None:
            return "is still running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how}: {self.error}" if self.error else how

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> bool:
        try:
            self._process.wait(max(timeout, 0))
        except subprocess.TimeoutExpired:
            return False
        self._exited.set()
        self._reader.join(LAST_LINES_SECONDS)
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        with self._process.stdout as stream:
            for raw in _lines(stream, self._exited):
                text = raw.decode("utf-8", "replace").rstrip()
                if text:
                    self.tail.append(text)
                    line = parse_line(self.name, text)
                    self.error = line.start_error or self.error
                    self._observe(line)

    def _await_end(self) -> None:
        if hasattr(os, "waitid"):
            # WNOWAIT: the pid cannot be reused until `wait` reaps the process, so `kill` cannot hit another process.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._process.wait()
        # Read the log first. It contains the reason of a failed start, which the supervisor shows.
        self._exited.set()
        self._reader.join(LAST_LINES_SECONDS)
        self._ended(self)


def _lines(stream: IO[bytes], exited: threading.Event) -> Iterator[bytes]:
    """Lines until the end of the stream, or until the process has exited and all that it wrote has been read."""
    partial = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            # Check for the exit before selecting, so that output written before the exit is still read.
            has_exited = exited.is_set()
            if not selector.select(0.0 if has_exited else SILENCE_SECONDS):
                if has_exited:
                    break
                continue
            data = os.read(stream.fileno(), MAX_LINE_BYTES)
            if not data:
                break
            *complete, partial = (partial + data).split(b"\n")
            yield from complete
            if len(partial) >= MAX_LINE_BYTES:
                yield partial
                partial = b""
    yield partial

"""One service as a child process, and the threads that read its log and wait for its exit."""

import os
import selectors
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

from sluice.launch.child import TAIL_LINES
from sluice.launch.logs import Observe, parse_line
from sluice.ring.process import PARENT_VARIABLE, START_FAILED

# A longer line comes in parts: a service that never writes a newline must not fill the launcher's memory.
MAX_LINE_BYTES = 1 << 16
# Between two looks whether a silent process has exited: a surviving grandchild may keep its pipe open.
SILENCE_SECONDS = 0.5
# For the last lines of an exited process to be observed. Not unbounded: an observer may block.
LAST_LINES_SECONDS = 10.0


class ChildProcess:
    """A running process. A thread passes its log lines to `observe`; after its exit another passes it to `ended`.

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
        """Its last log lines."""
        self.error = ""
        """The text of its `start_failed` event, if there was one."""
        self._observe = observe
        self._ended = ended
        # In its own process group: Ctrl-C in the terminal then reaches only the launcher, which drains in order.
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
        """How it exited, and why if it said so."""
        code = self._process.poll()
        if code is None:
            return "still runs"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how}: {self.error}" if self.error else how

    def terminate(self) -> None:
        """The service drains, then exits."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> bool:
        """Whether it exited within `timeout` seconds. Its log has been read by then."""
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
                    if line.event == START_FAILED:
                        self.error = str(line.fields.get("error", ""))
                    self._observe(line)

    def _await_end(self) -> None:
        if hasattr(os, "waitid"):
            # Without reaping: until `wait` does that, the pid cannot be reused, and `kill` hits no other process.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._process.wait()
        # First the log: it has the reason of a failed start, which the supervisor shows.
        self._exited.set()
        self._reader.join(LAST_LINES_SECONDS)
        self._ended(self)


def _lines(stream: IO[bytes], exited: threading.Event) -> Iterator[bytes]:
    """Until the end of the stream, or until nothing is left in it of a process that has exited."""
    partial = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            # In this order: what was written before the exit is seen by the look after it.
            over = exited.is_set()
            if not selector.select(0.0 if over else SILENCE_SECONDS):
                if over:
                    break
                continue
            data = os.read(stream.fileno(), MAX_LINE_BYTES)
            if not data:
                break
            *whole, partial = (partial + data).split(b"\n")
            yield from whole
            if len(partial) >= MAX_LINE_BYTES:
                yield partial
                partial = b""
    yield partial

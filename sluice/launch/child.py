"""One service as a child process, whose log is read to its end."""

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sluice.launch.logs import Observe, parse_line
from sluice.ring.keys import Role
from sluice.ring.process import PARENT_VARIABLE, START_FAILED

TAIL_LINES = 40
MAX_LINE_BYTES = 1 << 16
LAST_LINES_SECONDS = 1.0
"""To read what a process wrote last; a process of its own that outlives it may keep the log open."""


class Child:
    """A started process. `observe` gets its log lines, from a thread; then `ended` gets the child itself, from another.

    The process ends with the thread that made it (see `die_with_parent`). Raises OSError when it cannot be started.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        command: Sequence[str],
        environment: Mapping[str, str],
        observe: Observe,
        ended: Callable[["Child"], None],
        files: Sequence[int] = (),
    ) -> None:
        """`files` stay open in it."""
        self.name = name
        self.role = role
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Its last lines."""
        self.error = ""
        """Why it could not start, in its own words."""
        self._observe = observe
        self._ended = ended
        # In a process group of its own, Ctrl-C in the terminal reaches the launcher only, which then drains in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, PARENT_VARIABLE: str(os.getpid())},
            process_group=0,
            pass_fds=files,
        )
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name=f"end of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is None:
            return "still runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self, timeout: float) -> bool:
        """Whether it ended, and its log was read, within this many seconds."""
        try:
            self._process.wait(max(timeout, 0))
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(LAST_LINES_SECONDS)
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        with self._process.stdout as stream:
            while raw := stream.readline(MAX_LINE_BYTES):
                text = raw.decode("utf-8", "replace").rstrip()
                if text:
                    self.tail.append(text)
                    line = parse_line(self.name, text)
                    if line.event == START_FAILED:
                        self.error = str(line.fields.get("error", ""))
                    self._observe(line)

    def _await_end(self) -> None:
        if hasattr(os, "waitid"):
            # Leaves it to others to reap: a number that may already be somebody else's must not be killed.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._process.wait()
        self._reader.join(LAST_LINES_SECONDS)
        self._ended(self)

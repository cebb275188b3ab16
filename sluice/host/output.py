"""Standard streams whose methods never raise and never block: a thread writes the lines, and lost lines are counted."""

import atexit
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn, TextIO

# Limit on queued writes. More are dropped, because waiting for the reader of the stream would stop the service.
MAX_QUEUED = 4096
# Characters of an incomplete line that are buffered: a library may print forever without a newline.
MAX_PARTIAL = 1 << 16
# Limit on the time to write queued lines when the process exits.
DRAIN_SECONDS = 1.0
STANDARD_DESCRIPTORS = range(3)


class SafeStream(io.TextIOBase):
    """Replaces `sys.stderr` or `sys.stdout`, whose descriptor may be full, blocked, broken or closed. Thread-safe.

    When lines can be written again after some were lost, it writes a line that `notice` formats from their number.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, stream: TextIO | None, max_queued: int = MAX_QUEUED) -> None:
        """`stream`: the stream to replace. None, Python's value for a closed descriptor: all lines are lost."""
        super().__init__()
        self.notice: Callable[[int], str] = "{} lines of this log could not be written".format
        self._descriptor = None if stream is None else stream.fileno()
        self._terminal = stream is not None and stream.isatty()
        self._max_queued = max_queued
        self._queue: SimpleQueue[str | threading.Event] = SimpleQueue()
        # Reentrant: a finalizer or a signal handler may interrupt a write of its own thread.
        self._lock = threading.RLock()
        self._partial = ""
        self._dropped = 0
        """Lines dropped because the queue was full; written under the lock."""
        self._failed = 0
        """Lines that could not be written. Like the next two attributes, changed only by the writing thread."""
        self._reported = 0
        """Lost lines that a notice has reported."""
        self._torn = False
        """Whether the last write ended within a line."""
        threading.Thread(target=self._run, name="output", daemon=True).start()

    @property
    def lost(self) -> int:
        """Number of lines that were not written."""
        return self._dropped + self._failed

    def write(self, text: str) -> int:
        """Queue the complete lines, and buffer the incomplete last line until it is complete or flushed."""
        with self._lock:
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            self._put(lines + newline)
            if len(self._partial) > MAX_PARTIAL:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Queue the buffered text. Does not block; see `drain`."""
        with self._lock:
            text, self._partial = self._partial, ""
            self._put(text)

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Wait until everything queued so far has been written or lost. Returns whether that took at most `seconds`."""
        self.flush()
        written = threading.Event()
        self._queue.put(written)
        return written.wait(seconds)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        """Raises UnsupportedOperation, which is an OSError, if the output has no file descriptor."""
        if self._descriptor is None:
            raise io.UnsupportedOperation("the standard stream was closed when the process started")
        return self._descriptor

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._queue.qsize() < self._max_queued:
            self._queue.put(text)
        else:
            self._dropped += _lines(text)

    def _run(self) -> None:
        written = True
        while True:
            item = self._queue.get()
            if isinstance(item, str):
                written = self._write(item)
            if written and self._queue.empty():
                self._report()
            if isinstance(item, threading.Event):
                item.set()

    def _report(self) -> None:
        lost = self.lost
        if lost > self._reported and self._write(self.notice(lost - self._reported) + "\n"):
            self._reported = lost

    def _write(self, text: str) -> bool:
        """Write all of the text. If that fails, count its lines as lost and return False."""
        # If the last write ended within a line, begin a new line.
        data = ("\n" + text if self._torn else text).encode(self.encoding, self.errors)
        remaining = data
        try:
            while remaining:
                remaining = remaining[self._write_some(remaining) :]
        except OSError:
            self._failed += _lines(text)
            self._torn = self._torn or len(remaining) < len(data)
            return False
        self._torn = False
        return True

    def _write_some(self, data: bytes) -> int:
        descriptor = self.fileno()
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            # Another process that shares the descriptor has made it non-blocking.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
            return 0


def protect_stderr() -> SafeStream:
    """Replace `sys.stderr` by a SafeStream, for the log, warnings and tracebacks."""
    # Open closed standard descriptors on the null device. Otherwise a socket might get such a number, and everything
    # that C libraries print would be written to it.
    for descriptor in STANDARD_DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stderr = stream = SafeStream(sys.stderr)
    atexit.register(stream.drain)
    return stream


def protect_stdout() -> SafeStream:
    """Replace `sys.stdout` by a SafeStream, in a process whose output may be lost."""
    sys.stdout = stream = SafeStream(sys.stdout)
    atexit.register(stream.drain)
    return stream


def lines_lost() -> int:
    """Number of lines of this process's stderr that were not written; 0 without `protect_stderr`."""
    return sys.stderr.lost if isinstance(sys.stderr, SafeStream) else 0


def exit_now(status: int) -> NoReturn:
    """Write the queued output, then exit without the interpreter's clean-up."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, SafeStream):
            stream.drain()
        elif stream is not None:
            stream.flush()
    os._exit(status)


def _lines(text: str) -> int:
    return max(1, text.count("\n"))

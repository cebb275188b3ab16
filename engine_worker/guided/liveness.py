"""Waits for another process without waiting for one that a signal has stopped."""

import select
from pathlib import Path

STOPPED_SECONDS = 0.25
"""A process that does not answer for this long is checked: the step of every request may be waiting for it."""


def poll_of(descriptor: int) -> select.poll:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return poll


def wait_for(poll: select.poll, pid: int, seconds: float) -> None:
    """Wait until there is something to read from a process. Raises BlockingIOError after `seconds`, or as soon as a
    signal has stopped the process."""
    for _ in range(max(1, round(seconds / STOPPED_SECONDS))):
        if poll.poll(1000 * STOPPED_SECONDS):
            return
        if is_stopped(pid):
            break
    raise BlockingIOError(f"process {pid} does not answer")


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped the process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in ("T", "t")

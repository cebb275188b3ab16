"""Helpers to wait for other processes."""

import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 60.0
"""Seconds to wait for what must happen, generous enough for a busy machine."""


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    """Poll until the condition is true. Returns False if it was not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

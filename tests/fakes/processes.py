"""Waiting for other processes, and ports for them."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

LIMIT = 60.0
"""Seconds for what must happen, on a machine that has much else to do."""


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return first


def wait_until(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    """Whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True

"""An engine that is stopped for a while, and what it still does when it continues.

Its log tells: after half a minute it assumes that the routers are gone, and its heartbeats omit those steps.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from sluice.launch import LogLine, Ring

CALLBACK = f"{__name__}:write_line"
STDOUT = 1
BEFORE_SECONDS = 2.0


def write_line(text: str) -> None:
    """To the log, in one write: other threads write there too."""
    os.write(STDOUT, f"{text}\n".encode())


class EngineLines:
    """Statistics that engines write to their logs. Called from the threads that read the logs."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, line: LogLine) -> None:
        if line.fields.get("type") in ("step", "request"):
            self._lines.append((line.child, line.fields))

    def clear(self) -> None:
        self._lines = []

    def of(self, service: str, kind: str) -> list[dict[str, Any]]:
        return [fields for child, fields in self._lines if child == service and fields["type"] == kind]


class Frozen(msgspec.Struct, frozen=True):
    """One engine that received SIGSTOP, and SIGCONT later."""

    service: str
    seconds: float
    held: int
    late: int
    """Of those, requests that it drew further tokens of afterwards: rows that no router expects any more."""
    new: int
    """Requests that it received afterwards."""


async def freeze(
    ring: Ring, lines: EngineLines, service: str, seconds: float, after_seconds: float, on_continue: Callable[[], None]
) -> Frozen:
    """Stop it for `seconds`, then let it run for `after_seconds`; `on_continue` is called in between.

    Raises RuntimeError if it was restarted meanwhile.
    """
    pid = ring.pids[service]
    lines.clear()
    await asyncio.sleep(BEFORE_SECONDS)
    stopped = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        continued = time.time()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    on_continue()
    await asyncio.sleep(after_seconds)
    if ring.pids[service] != pid:
        raise RuntimeError(f"{service} was restarted within {seconds:g} s without progress")
    steps, requests = lines.of(service, "step"), lines.of(service, "request")
    held = [step["active_requests"] for step in steps if step["time"] <= stopped]
    late = [each for each in requests if each["arrival"] < stopped and (each["last_token"] or 0.0) > continued]
    new = [each for each in requests if each["arrival"] > continued]
    return Frozen(service, seconds, held[-1], _count(late), _count(new))


def _count(reports: list[dict[str, Any]]) -> int:
    """Attempts: each is reported repeatedly."""
    return len({(each["request_id"], each["arrival"]) for each in reports})

"""An engine that stands still for a while, and what it has to say when it goes on.

It says so in its log: after half a minute it assumes that the routers are gone, and its heartbeats leave those steps
out.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from bench.deaths.tell import Heard
from sluice.launch import Ring

LISTEN_SECONDS = 2.0
"""Before it stops."""


class Frozen(msgspec.Struct, frozen=True):
    """One engine that got SIGSTOP, and SIGCONT later."""

    service: str
    seconds: float
    """From one to the other."""
    held: int
    """Requests that lived in it when it stopped."""
    late: int
    """Of those, that it drew another token of when it went on: rows that nobody awaited any more."""
    new: int
    """Requests that it got afterwards."""


async def freeze(
    ring: Ring, heard: Heard, service: str, seconds: float, after_seconds: float, goes_on: Callable[[], None]
) -> Frozen:
    """Stop it for so long, let it go on and listen for `after_seconds`; `goes_on` is called in between.

    Raises RuntimeError where it was not the same process all the time.
    """
    pid = ring.pids[service]
    heard.forget()
    await asyncio.sleep(LISTEN_SECONDS)
    stopped = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        continued = time.time()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    goes_on()
    await asyncio.sleep(after_seconds)
    if ring.pids[service] != pid:
        raise RuntimeError(f"{service} was started again within {seconds:g} s without a turn of its loop")
    steps, requests = heard.of(service, "step"), heard.of(service, "request")
    held = [step["active_requests"] for step in steps if step["time"] <= stopped]
    late = [each for each in requests if each["arrival"] < stopped and (each["last_token"] or 0.0) > continued]
    new = [each for each in requests if each["arrival"] > continued]
    return Frozen(service, seconds, held[-1], _count(late), _count(new))


def _count(reports: list[dict[str, Any]]) -> int:
    """Of attempts: each is reported again and again."""
    return len({(each["request_id"], each["arrival"]) for each in reports})

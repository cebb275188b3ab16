"""An engine that is stopped for a while, its work after it continues, and the requests left in a ring at the end."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import msgspec

from sluice import AsyncClient
from sluice.launch import LogLine, Ring

CALLBACK = f"{__name__}:write_line"
STDOUT = 1
BEFORE_SECONDS = 2.0


def write_line(text: str) -> None:
    """Writes to the log in one system call, because other threads write there too."""
    os.write(STDOUT, f"{text}\n".encode())


class Frozen(msgspec.Struct, frozen=True):
    """One engine that received SIGSTOP, and SIGCONT later."""

    service: str
    seconds: float
    held: int
    late: int
    """Held requests for which the engine sampled more tokens afterwards, which no router expects any more."""
    new: int
    """Requests that the engine received afterwards."""


async def freeze(
    ring: Ring, log: list[LogLine], service: str, seconds: float, after: float, on_continue: Callable[[], None]
) -> Frozen:
    """Stops an engine for `seconds`. `log` has the lines of the ring; `on_continue` is called when the engine
    continues. Raises RuntimeError if the engine was restarted meanwhile."""
    pid = ring.pids[service]
    log.clear()
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
    await asyncio.sleep(after)
    if ring.pids[service] != pid:
        raise RuntimeError(f"{service} was restarted within {seconds:g} s without progress")
    own = [line.fields for line in log if line.child == service]
    steps, requests = ([fields for fields in own if fields.get("type") == kind] for kind in ("step", "request"))
    held = [step["active_requests"] for step in steps if step["time"] <= stopped]
    late = [each for each in requests if each["arrival"] < stopped and (each["last_token"] or 0.0) > continued]
    new = [each for each in requests if each["arrival"] > continued]
    return Frozen(service, seconds, held[-1], _count(late), _count(new))


def _count(reports: list[dict[str, Any]]) -> int:
    """Number of attempts; an attempt is reported repeatedly."""
    return len({(each["request_id"], each["arrival"]) for each in reports})


POLL_SECONDS = 0.1
TIMEOUT_SECONDS = 60.0


class Leftovers(msgspec.Struct, frozen=True):
    """What is left in a ring, by the latest heartbeats. Falsy if nothing is left and every peer sends heartbeats."""

    silent: list[str]
    """Engines and detokenizers without a heartbeat."""
    requests: int = 0
    blocks: int = 0
    """KV cache blocks that requests hold."""
    streams: int = 0
    """Live sequences in detokenizers."""

    def __bool__(self) -> bool:
        return bool(self.silent or self.requests or self.blocks or self.streams)


async def leftovers(client: AsyncClient, ring: Ring, but: Collection[str] = ()) -> Leftovers:
    """Waits until nothing is left, at most a minute. Services in `but` are ignored."""
    end = asyncio.get_running_loop().time() + TIMEOUT_SECONDS
    while (found := await _look(client, ring, but)) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(POLL_SECONDS)
    return found


async def _look(client: AsyncClient, ring: Ring, but: Collection[str]) -> Leftovers:
    expected = {name for name, child in ring.children.items() if child.role != "router"} - set(but)
    stats = await client.stats()
    engines = [engine for engine in stats.engines if engine.engine_id in expected]
    detokenizers = [detokenizer for detokenizer in stats.detokenizers if detokenizer.detokenizer_id in expected]
    present = {engine.engine_id for engine in engines} | {each.detokenizer_id for each in detokenizers}
    return Leftovers(
        sorted(expected - present),
        sum(engine.active_requests for engine in engines),
        sum(engine.used_kv_blocks for engine in engines),
        sum(detokenizer.streams for detokenizer in detokenizers),
    )

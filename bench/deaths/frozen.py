"""An engine that stands still for a while, and what it has to say when it goes on."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from sluice import AsyncClient
from sluice.launch import Ring
from sluice.v1.admin_pb2 import EngineStats, RequestStats

LISTEN_SECONDS = 2.0
"""Before it stops: longer than from beat to beat."""


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
    client: AsyncClient, ring: Ring, service: str, seconds: float, after_seconds: float, goes_on: Callable[[], None]
) -> Frozen:
    """Stop it for so long, let it go on and listen for `after_seconds`; `goes_on` is called in between.

    Raises RuntimeError where it was not the same process all the time.
    """
    pid = ring.pids[service]
    async with _told(client, service) as told:
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
    held = [step.active_requests for step in told.steps if _unix(step.time) <= stopped]
    late = [each for each in told.requests if _unix(each.arrival) < stopped and _unix(each.last_token) > continued]
    new = [each for each in told.requests if _unix(each.arrival) > continued]
    return Frozen(service, seconds, held[-1], _count(late), _count(new))


class _Told:
    """By the engine, of its steps and requests."""

    def __init__(self) -> None:
        self.steps: list[EngineStats] = []
        self.requests: list[RequestStats] = []


@asynccontextmanager
async def _told(client: AsyncClient, service: str) -> AsyncIterator[_Told]:
    told = _Told()

    async def read() -> None:
        async for response in news:
            told.steps += [step for step in response.steps if step.engine_id == service]
            told.requests += [each for each in response.requests if each.engine_id == service]

    async with client.stream_steps() as news:
        await news.started()
        reading = asyncio.create_task(read())
        try:
            yield told
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading


def _count(reports: list[RequestStats]) -> int:
    """Of attempts: each is reported again and again."""
    return len({(each.request_id, each.arrival.ToNanoseconds()) for each in reports})


def _unix(time: Timestamp) -> float:
    return time.ToNanoseconds() / 1e9

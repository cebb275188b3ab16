"""Helpers for rings on Ray: streams over them, and the processes of their actors."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sluice import AsyncClient
from sluice.launch import LogLine, Ring
from tests.system.followed_streams import Stream, follow

MARKS = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("SLUICE_TEST_RAY" not in os.environ, reason="takes minutes: set SLUICE_TEST_RAY=1"),
]
"""Marks of all tests of a ring on Ray."""
PATIENCE = 120.0
"""Seconds until a killed actor serves again: Ray restarts its process, which restarts the service."""
ATTEMPTS = 3
"""Attempts to start Ray: a raylet gives up if its agents start slowly, as they do on a busy machine."""
OBJECT_STORE_BYTES = 80_000_000
SPECS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2, "n": 2}]


class Events(list[tuple[str, str]]):
    """Collects the launcher's log lines as (service, event)."""

    def __call__(self, line: LogLine) -> None:
        if line.fields.get("service") == "launcher":
            self.append((line.child, str(line.event)))


def parent(pid: int) -> int:
    """The parent of a process; for a service, the process of its actor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def undisturbed_streams(ring: Ring) -> list[Stream]:
    async with AsyncClient(ring.addresses, timeout=PATIENCE) as client:
        return await asyncio.gather(*(follow(client, spec, asyncio.Semaphore(0)) for spec in SPECS))


async def streams_over(strike: Callable[[], object], addresses: Sequence[str]) -> list[Stream]:
    """The streams of clients, disturbed by `strike` once all of them are halfway."""
    async with AsyncClient(addresses, timeout=2 * PATIENCE) as client:
        half_way = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(follow(client, spec, half_way)) for spec in SPECS]
        for _ in SPECS:
            await half_way.acquire()
        await asyncio.to_thread(strike)
        return await asyncio.gather(*streams)

"""Helpers for rings on Ray: streams over them, and the processes of their actors."""

import asyncio
from pathlib import Path

from sluice import AsyncClient
from sluice.launch import LogLine, Ring
from tests.system.followed_streams import Stream, follow

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

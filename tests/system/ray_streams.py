"""Streams over a ring on Ray, and the processes behind its services."""

import asyncio
from pathlib import Path

from sluice import AsyncClient
from sluice.launch import LogLine, Ring

PATIENCE = 120.0
"""Seconds until a killed actor serves again: Ray starts a process for it, and that one the service."""
ATTEMPTS = 3
"""A raylet gives up if its agents are late, as they are on busy cores."""
OBJECT_STORE_BYTES = 80_000_000
PROMPT = "def fibonacci(n):\n"
SPECS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2, "n": 2}]
TOKENS, ENOUGH = 200, 20

Stream = dict[int, tuple[str, list[int]]]
"""Text and tokens of each output."""


class Events(list[tuple[str, str]]):
    """The launcher's own lines, as (service, event)."""

    def __call__(self, line: LogLine) -> None:
        if line.fields.get("service") == "launcher":
            self.append((line.child, str(line.event)))


def parent(pid: int) -> int:
    """Of a service: its actor's process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def follow(client: AsyncClient, spec: dict, half_way: asyncio.Semaphore) -> Stream:
    """Every offset must come once, in order."""
    found: Stream = {}
    async for chunk in client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, token_ids=True, **spec):
        text, tokens = found.get(chunk.index, ("", []))
        if chunk.token_ids:
            assert chunk.token_offset == len(tokens)
        found[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids])
        if len(found[chunk.index][1]) > ENOUGH:
            half_way.release()
    return found


async def undisturbed_streams(ring: Ring) -> list[Stream]:
    async with AsyncClient(ring.addresses, timeout=PATIENCE) as client:
        return await asyncio.gather(*(follow(client, spec, asyncio.Semaphore(0)) for spec in SPECS))

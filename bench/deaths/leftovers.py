"""What still lives in a ring after all its streams have ended."""

import asyncio
from collections.abc import Collection

import msgspec

from sluice import AsyncClient
from sluice.launch import Ring

POLL_SECONDS = 0.1
TIMEOUT_SECONDS = 60.0


class Leftovers(msgspec.Struct, frozen=True):
    """By the latest heartbeats; falsy if every peer reports none."""

    unheard: list[str]
    """Engines and detokenizers without a heartbeat."""
    requests: int = 0
    blocks: int = 0
    """Held by requests."""
    streams: int = 0
    """In detokenizers."""

    def __bool__(self) -> bool:
        return bool(self.unheard or self.requests or self.blocks or self.streams)


async def leftovers(client: AsyncClient, ring: Ring, but: Collection[str] = ()) -> Leftovers:
    """As soon as there are none, or after a minute. Services in `but` are ignored."""
    end = asyncio.get_running_loop().time() + TIMEOUT_SECONDS
    while (found := await _look(client, ring, but)) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(POLL_SECONDS)
    return found


async def _look(client: AsyncClient, ring: Ring, but: Collection[str]) -> Leftovers:
    asked = {name for name, child in ring.children.items() if child.role != "router"} - set(but)
    stats = await client.stats()
    engines = [engine for engine in stats.engines if engine.engine_id in asked]
    detokenizers = [detokenizer for detokenizer in stats.detokenizers if detokenizer.detokenizer_id in asked]
    present = {engine.engine_id for engine in engines} | {each.detokenizer_id for each in detokenizers}
    return Leftovers(
        sorted(asked - present),
        sum(engine.active_requests for engine in engines),
        sum(engine.used_kv_blocks for engine in engines),
        sum(detokenizer.streams for detokenizer in detokenizers),
    )

"""What still lives in a ring once all its streams have ended."""

import asyncio
from collections.abc import Collection

import msgspec

from sluice import AsyncClient
from sluice.launch import Ring

LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 60.0


class Left(msgspec.Struct, frozen=True):
    """By the latest heartbeats; false when there is nothing, and every peer said so."""

    unheard: list[str]
    """Engines and detokenizers that are not heard."""
    requests: int = 0
    """In engines."""
    blocks: int = 0
    """That requests hold."""
    streams: int = 0
    """In detokenizers."""

    def __bool__(self) -> bool:
        return bool(self.unheard or self.requests or self.blocks or self.streams)


async def left(client: AsyncClient, ring: Ring, but: Collection[str] = ()) -> Left:
    """As soon as nothing is left, or after a minute. Of the services `but` nothing is asked."""
    end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while (found := await _look(client, ring, but)) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(LOOK_SECONDS)
    return found


async def _look(client: AsyncClient, ring: Ring, but: Collection[str]) -> Left:
    asked = {name for name, child in ring.children.items() if child.role != "router"} - set(but)
    stats = await client.stats()
    engines = [engine for engine in stats.engines if engine.engine_id in asked]
    detokenizers = [detokenizer for detokenizer in stats.detokenizers if detokenizer.detokenizer_id in asked]
    heard = {engine.engine_id for engine in engines} | {each.detokenizer_id for each in detokenizers}
    return Left(
        sorted(asked - heard),
        sum(engine.active_requests for engine in engines),
        sum(engine.used_kv_blocks for engine in engines),
        sum(detokenizer.streams for detokenizer in detokenizers),
    )

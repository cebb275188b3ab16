"""Streams of which an engine dies in the middle."""

import asyncio
import os
import signal
from collections.abc import Sequence

from sluice import AsyncClient
from sluice.launch import Ring

GREEDY = {"temperature": 0, "token_ids": True, "ignore_eos": True}


async def streams_over_a_death(
    ring: Ring, asked: Sequence[tuple[str, dict]], count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """`count` tokens of each (text, options), greedily, while engine-0 is killed; and the ids of each text."""
    async with AsyncClient(ring.address, timeout=200) as client:
        begun = asyncio.Event()

        async def tokens(text: str, options: dict) -> list[int]:
            found: list[int] = []
            async for chunk in client.stream(text, max_tokens=count, **options, **GREEDY):
                assert chunk.token_offset == len(found)
                found += chunk.token_ids
                if len(found) > 8:
                    begun.set()
            return found

        streams = [asyncio.ensure_future(tokens(*each)) for each in asked]
        await asyncio.wait_for(begun.wait(), 60)
        os.kill(ring.pids["engine-0"], signal.SIGKILL)
        found = await asyncio.gather(*streams)
        return found, [list((await client.tokenize(text)).token_ids) for text, _ in asked]

"""Streams whose engine is killed in the middle."""

import asyncio
import os
import signal
from collections.abc import Sequence

from sluice import AsyncClient
from sluice.launch import Ring

GREEDY = {"temperature": 0, "token_ids": True, "ignore_eos": True}


async def streams_over_a_death(
    ring: Ring, requests: Sequence[tuple[str, dict]], count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Stream `count` greedy tokens for each (text, options), and kill engine-0 meanwhile.

    Returns the output of each request, and the token ids of its text.
    """
    async with AsyncClient(ring.address, timeout=200) as client:
        streaming = asyncio.Event()

        async def tokens(text: str, options: dict) -> list[int]:
            output: list[int] = []
            async for chunk in client.stream(text, max_tokens=count, **options, **GREEDY):
                assert chunk.token_offset == len(output)
                output += chunk.token_ids
                if len(output) > 8:
                    streaming.set()
            return output

        streams = [asyncio.ensure_future(tokens(*request)) for request in requests]
        await asyncio.wait_for(streaming.wait(), 60)
        os.kill(ring.pids["engine-0"], signal.SIGKILL)
        outputs = await asyncio.gather(*streams)
        return outputs, [list((await client.tokenize(text)).token_ids) for text, _ in requests]

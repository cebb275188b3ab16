"""Streams that are disturbed in the middle, to be compared with undisturbed ones."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sluice import AsyncClient
from tests.fakes.processes import LIMIT

PROMPT = "def fibonacci(n):\n"
TOKENS, ENOUGH = 200, 20
BEGUN = 10
"""Number of tokens after which a stream counts as begun."""

Stream = dict[int, tuple[str, list[int]]]
"""Text and token ids of each output."""


class Streamed(NamedTuple):
    token_ids: list[int]
    resumed: int
    """How often the stream was resumed."""


async def follow(client: AsyncClient, spec: dict, half_way: asyncio.Semaphore) -> Stream:
    """Read a stream, whose offsets must be consecutive. Releases `half_way` for each chunk after the first tokens."""
    outputs: Stream = {}
    async for chunk in client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, token_ids=True, **spec):
        text, tokens = outputs.get(chunk.index, ("", []))
        if chunk.token_ids:
            assert chunk.token_offset == len(tokens)
        outputs[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids])
        if len(outputs[chunk.index][1]) > ENOUGH:
            half_way.release()
    return outputs


async def disturbed_streams(
    addresses: str | Sequence[str], prompt: Any, options: Sequence[dict[str, Any]], disturb: Callable[[], None]
) -> list[Streamed]:
    """Run a stream with each of these options, and call `disturb` in a thread once all have begun."""
    begun = asyncio.Semaphore(0)
    async with AsyncClient(addresses, timeout=2 * LIMIT) as client, asyncio.timeout(3 * LIMIT):

        async def run(choice: dict[str, Any]) -> Streamed:
            stream, token_ids = client.stream(prompt, **choice), []
            async for chunk in stream:
                former_length, token_ids = len(token_ids), [*token_ids, *chunk.token_ids]
                if former_length < BEGUN <= len(token_ids):
                    begun.release()
            return Streamed(token_ids, stream.resumed)

        streams = [asyncio.create_task(run(choice)) for choice in options]
        for _ in streams:
            await begun.acquire()
        await asyncio.to_thread(disturb)
        return await asyncio.gather(*streams)

"""Streams that can be disturbed half way, and compared with each other."""

import asyncio

from sluice import AsyncClient

PROMPT = "def fibonacci(n):\n"
TOKENS, ENOUGH = 200, 20

Stream = dict[int, tuple[str, list[int]]]
"""Text and token ids of each output."""


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

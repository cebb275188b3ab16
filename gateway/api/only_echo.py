"""Completions with `echo` and `max_tokens: 0`, which score a prompt. The ring generates one token, which is dropped."""

from sluice.client import AsyncStream, Chunk, FinishReason, Generation, Output


def echoed(chunk: Chunk) -> Chunk | None:
    """The chunk without what belongs to the output; None if nothing is left."""
    if chunk.finish_reason is not None:
        return Chunk(chunk.index, finish_reason=FinishReason.LENGTH)
    # Later chunks have tokens, or text that was held back after tokens.
    return None if chunk.token_count or chunk.token_offset else chunk


async def collect(stream: AsyncStream) -> Generation:
    """The complete result without the output's token. Raises SluiceError."""
    texts: dict[int, str] = {}
    async with stream:
        async for chunk in stream:
            kept = echoed(chunk)
            texts[chunk.index] = texts.get(chunk.index, "") + (kept.text if kept else "")
    generation = await stream.collect()
    outputs = (
        Output(index, text, (), (), FinishReason.LENGTH, None, None, None, None)
        for index, text in sorted(texts.items())
    )
    return Generation(generation.request_id, tuple(outputs), generation.usage, None, generation.prompt_logprobs, ())

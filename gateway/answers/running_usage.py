"""The token counts while a response is streamed, for `stream_options.continuous_usage_stats`."""

from gateway.answers.objects import CachedTokens, Usage
from sluice.client import AsyncStream, Chunk


class RunningUsage:
    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        """Prompt tokens and cached tokens, by number of the stream."""
        self._outputs: dict[tuple[int, int], int] = {}
        """Number of tokens so far, by number of the stream and index of the output."""

    def add(self, number: int, stream: AsyncStream, chunk: Chunk) -> Usage:
        self._prompts[number] = (stream.prompt_tokens, stream.cached_tokens)
        self._outputs[number, chunk.index] = chunk.token_offset + chunk.token_count
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        completion = sum(self._outputs.values())
        cached = sum(tokens for _, tokens in self._prompts.values())
        return Usage(prompt, completion, prompt + completion, CachedTokens(cached))

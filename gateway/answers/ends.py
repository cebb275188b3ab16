"""The finish reason and the token counts of a response."""

from typing import Any

from msgspec import UNSET

from gateway.answers.objects import CachedTokens, Usage
from sluice import client
from sluice.client import AsyncStream, Chunk, FinishReason

REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
}
KNOWN = frozenset(REASONS) - {FinishReason.TIME_LIMIT}
"""Reasons that OpenAI's `finish_reason` expresses sufficiently; others are also reported as `sluice_reason`."""


def end_of(output: client.Output | Chunk, called_tools: bool = False) -> dict[str, Any]:
    """The fields of `End`, as keyword arguments."""
    reason = output.finish_reason or FinishReason.UNKNOWN
    named = REASONS.get(reason, "stop")
    return {
        "finish_reason": "tool_calls" if called_tools and named == "stop" else named,
        "stop_reason": output.stop_token_id if output.stop_string is None else output.stop_string,
        "sluice_reason": UNSET if reason in KNOWN else str(reason),
    }


def was_cut(output: client.Output | Chunk) -> bool:
    """Whether the output would have continued: not if it ended by an end or stop token."""
    return output.finish_reason not in (FinishReason.EOS, FinishReason.STOP_TOKEN)


def usage_of(*parts: client.Usage) -> Usage:
    prompt, completion = sum(part.prompt_tokens for part in parts), sum(part.completion_tokens for part in parts)
    return Usage(prompt, completion, prompt + completion, CachedTokens(sum(part.cached_tokens for part in parts)))


class RunningUsage:
    """The token counts while a response is streamed, for `stream_options.continuous_usage_stats`."""

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

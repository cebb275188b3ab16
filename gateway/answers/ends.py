"""The finish reason and the token counts of a response."""

from typing import Any

from msgspec import UNSET

from gateway.answers.objects import CachedTokens, Usage
from sluice import client
from sluice.client import FinishReason

REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
}
KNOWN = frozenset(REASONS) - {FinishReason.TIME_LIMIT}
"""Reasons that OpenAI's `finish_reason` expresses sufficiently; others are also reported as `sluice_reason`."""


def end_of(output: client.Output | client.Chunk, called_tools: bool = False) -> dict[str, Any]:
    """The fields of `End`, as keyword arguments."""
    reason = output.finish_reason or FinishReason.UNKNOWN
    named = REASONS.get(reason, "stop")
    return {
        "finish_reason": "tool_calls" if called_tools and named == "stop" else named,
        "stop_reason": output.stop_token_id if output.stop_string is None else output.stop_string,
        "sluice_reason": UNSET if reason in KNOWN else str(reason),
    }


def was_cut(output: client.Output | client.Chunk) -> bool:
    """Whether the output would have continued: not if it ended by an end or stop token."""
    return output.finish_reason not in (FinishReason.EOS, FinishReason.STOP_TOKEN)


def usage_of(*parts: client.Usage) -> Usage:
    prompt, completion = sum(part.prompt_tokens for part in parts), sum(part.completion_tokens for part in parts)
    return Usage(prompt, completion, prompt + completion, CachedTokens(sum(part.cached_tokens for part in parts)))

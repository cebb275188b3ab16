"""How an answer ended, and its token counts."""

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


def end_of(output: client.Output | client.Chunk, called_tools: bool = False) -> dict[str, Any]:
    """The fields of `End`."""
    reason = output.finish_reason or FinishReason.UNKNOWN
    named = REASONS.get(reason, "stop")
    return {
        "finish_reason": "tool_calls" if called_tools and named == "stop" else named,
        "stop_reason": output.stop_token_id if output.stop_string is None else output.stop_string,
        "sluice_reason": UNSET if reason in KNOWN else str(reason),
    }


def usage_of(*parts: client.Usage) -> Usage:
    prompt, completion = sum(each.prompt_tokens for each in parts), sum(each.completion_tokens for each in parts)
    return Usage(prompt, completion, prompt + completion, CachedTokens(sum(each.cached_tokens for each in parts)))

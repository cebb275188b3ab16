"""Finish reasons in OpenAI's terms."""

import pytest
from msgspec import UNSET

from gateway.answers.ends import end_of, usage_of
from sluice.client import Chunk, FinishReason, Usage


@pytest.mark.parametrize(
    ("reason", "openai_reason", "sluice_reason"),
    [
        ("eos", "stop", UNSET),
        ("stop_string", "stop", UNSET),
        ("stop_token", "stop", UNSET),
        ("length", "length", UNSET),
        ("time_limit", "length", "time_limit"),
        ("aborted", "stop", "aborted"),
        ("unknown", "stop", "unknown"),
    ],
)
def test_reasons(reason, openai_reason, sluice_reason):
    finish = end_of(Chunk(0, finish_reason=FinishReason(reason)))
    assert (finish["finish_reason"], finish["sluice_reason"]) == (openai_reason, sluice_reason)


def test_tool_calls_is_the_reason_unless_the_output_was_cut():
    assert end_of(Chunk(0, finish_reason=FinishReason.EOS), called_tools=True)["finish_reason"] == "tool_calls"
    assert end_of(Chunk(0, finish_reason=FinishReason.LENGTH), called_tools=True)["finish_reason"] == "length"


def test_stop_reason():
    assert end_of(Chunk(0, finish_reason=FinishReason.STOP_STRING, stop_string="!"))["stop_reason"] == "!"
    assert end_of(Chunk(0, finish_reason=FinishReason.STOP_TOKEN, stop_token_id=7))["stop_reason"] == 7


def test_the_usage_of_several_prompts():
    usage = usage_of(Usage(3, 2, 1, 0), Usage(5, 4, 2, 0))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 6, 14)
    assert usage.prompt_tokens_details.cached_tokens == 3

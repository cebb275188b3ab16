"""Response objects of OpenAI's API, encoded as JSON."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class End(msgspec.Struct, kw_only=True):
    """Why a choice ended."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the choice, as in vLLM."""
    sluice_reason: str | UnsetType = UNSET
    """The ring's finish reason, where `finish_reason` does not express it."""


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(End, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None


class ChatDeltaChoice(End, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(End, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, float] | None] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """The response object of both endpoints, complete or one chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[End]
    usage: Usage | UnsetType | None = UNSET

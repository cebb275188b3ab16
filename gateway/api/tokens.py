"""/tokenize and /detokenize, as in vLLM."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.errors import invalid
from gateway.requests.body import decode
from gateway.requests.chat import ChatMessage, ChatRequest
from gateway.requests.tools import Tool

CHAT_OPTIONS = ("template_kwargs", "continue_final_message")


class TokenizeRequest(msgspec.Struct):
    """Has either a prompt or messages."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    def chat(self) -> ChatRequest:
        """Raises ApiError."""
        chat = ChatRequest(
            messages=self.messages or [],
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        chat.check()
        return chat


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Tokens(msgspec.Struct):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET
    """The part of the text that each token stands for, if requested. A special token added to the text has none."""


async def tokenize(gateway: Gateway, exchange: Exchange) -> bytes:
    """Raises ApiError."""
    body = decode(exchange.body, TokenizeRequest)
    gateway.counters.unknown_fields += len(body.unknown)
    request, metadata = body.fields, exchange.caller.metadata
    text, options = _text_and_options(request, bytes(body.raw["tools"]).decode() if request.tools else None)
    with ring_errors():
        tokenized = await gateway.client.tokenize(
            text, model=request.model or "", add_special_tokens=request.add_special_tokens, metadata=metadata, **options
        )
        models = await gateway.client.models(metadata=metadata)
    max_model_len = max((model.max_context_tokens for model in models), default=0)
    texts = [request.prompt[start:end] for start, end in tokenized.offsets] if request.prompt is not None else []
    return msgspec.json.encode(
        Tokens(
            tokenized.token_ids,
            len(tokenized.token_ids),
            max_model_len,
            token_strs=texts if request.return_token_strs else UNSET,
        )
    )


def _text_and_options(
    request: TokenizeRequest, tools_json: str | None
) -> tuple[str | list[dict[str, Any]], dict[str, Any]]:
    """The text or the messages to tokenize, and the options for messages. Raises ApiError."""
    if request.prompt is not None:
        if request.messages is not None:
            raise invalid("cannot be combined with prompt", "messages")
        return request.prompt, {"offsets": True} if request.return_token_strs else {}
    if request.messages is None:
        raise invalid("is missing: give prompt or messages", "prompt")
    if request.return_token_strs:
        raise invalid("needs prompt, is not supported for messages", "return_token_strs")
    chat = request.chat()
    known = {name: value for name, value in chat.options().items() if name in CHAT_OPTIONS}
    return chat.prompt(), known | {"tools_json": tools_json}


async def detokenize(gateway: Gateway, exchange: Exchange) -> bytes:
    body = decode(exchange.body, DetokenizeRequest)
    gateway.counters.unknown_fields += len(body.unknown)
    request = body.fields
    with ring_errors():
        text = await gateway.client.detokenize(
            request.tokens,
            model=request.model or "",
            # False by default, as in vLLM and unlike on the ring.
            skip_special_tokens=bool(request.skip_special_tokens),
            metadata=exchange.caller.metadata,
        )
    return msgspec.json.encode({"prompt": text})

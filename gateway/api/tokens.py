"""/tokenize and /detokenize, as of vLLM."""

import msgspec

from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.requests.body import decode


class TokenizeRequest(msgspec.Struct):
    prompt: str
    model: str = ""
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool | None = None


class Tokens(msgspec.Struct):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class Text(msgspec.Struct):
    prompt: str


async def tokenize(gateway: Gateway, exchange: Exchange) -> bytes:
    body = decode(exchange.body, TokenizeRequest, refused=("messages",))
    gateway.counters.unknown_fields += body.unknown
    request, metadata = body.fields, exchange.caller.metadata
    with ring_errors():
        found = await gateway.client.tokenize(
            request.prompt, model=request.model, add_special_tokens=request.add_special_tokens, metadata=metadata
        )
        models = await gateway.client.models(metadata=metadata)
    most = max((model.max_context_tokens for model in models), default=0)
    return msgspec.json.encode(Tokens(found.token_ids, len(found.token_ids), most))


async def detokenize(gateway: Gateway, exchange: Exchange) -> bytes:
    body = decode(exchange.body, DetokenizeRequest)
    gateway.counters.unknown_fields += body.unknown
    request = body.fields
    with ring_errors():
        text = await gateway.client.detokenize(
            request.tokens,
            model=request.model,
            # As of vLLM, unlike the ring's default.
            skip_special_tokens=bool(request.skip_special_tokens),
            metadata=exchange.caller.metadata,
        )
    return msgspec.json.encode(Text(text))

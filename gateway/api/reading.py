"""Reads the body of a completion or a chat, and settles what only the ring knows."""

from typing import TypeVar

from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.requests.body import Body, decode
from gateway.requests.common import Common
from gateway.requests.unknown import check_unknown

T = TypeVar("T", bound=Common)


async def read(
    gateway: Gateway, exchange: Exchange, kind: type[T], refused: tuple[str, ...], without_meaning: tuple[str, ...]
) -> Body[T]:
    """Raises ApiError."""
    body = decode(exchange.body, kind, refused, without_meaning)
    if body.unknown:
        gateway.counters.unknown_fields += len(body.unknown)
        check_unknown(body.unknown)
    request = body.fields
    request.check()
    exchange.notes["user"] = request.logged_user
    if request.truncate_prompt_tokens == -1:
        with ring_errors():
            models = await gateway.client.models(metadata=exchange.caller.metadata)
        request.truncate_to(max(model.max_context_tokens for model in models))
    return body

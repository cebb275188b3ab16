"""Reads a request's body within limits of size and time, and decodes it."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.byte_budget import OverBudget, Share
from gateway.errors import ApiError, invalid
from gateway.requests.choices import choices_at

RECEIVE_SECONDS = 30.0
UNCHECKED_BYTES = 64 << 10
"""A larger body is read only if the routers accept its token."""
RETRY_SECONDS = 1.0
PLACE = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
INVALID_CHOICE = "Invalid enum value"
"""How msgspec's error for a value that is not among those of a Literal begins."""
NOTHING = frozenset((b"null", b"false", b'""', b"[]", b"{}"))
"""Values that mean the same as omitting the field."""

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    fields: T
    raw: dict[str, msgspec.Raw]
    """The fields of the body as the client sent them, not decoded."""
    unknown: int
    """Number of unknown fields."""


async def read_body(
    request: Request, max_bytes: int, share: Share, check_token: Callable[[], Awaitable[None]]
) -> bytes:
    """`share` pays for the body. `check_token` is awaited before more than UNCHECKED_BYTES are read.

    Raises ApiError, OverBudget, ClientDisconnect.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    if not declared.isdecimal() or int(declared) > UNCHECKED_BYTES:
        await check_token()
    body = bytearray()
    try:
        async with asyncio.timeout(RECEIVE_SECONDS) as limit:
            share.evict = lambda: limit.reschedule(0)
            async for part in request.stream():
                share.add(len(part))
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        if share.evict is None:
            raise OverBudget("the body made room for those of other clients") from None
        raise ApiError(408, f"the body did not arrive within {RECEIVE_SECONDS:g} s", "timeout_error") from None
    share.evict = None
    return bytes(body)


def decode(data: bytes, kind: type[T], refused: Iterable[str] = (), without_meaning: Iterable[str] = ()) -> Body[T]:
    """`refused`: unsupported fields that would change the answer; `without_meaning`: fields that may be ignored.

    Raises ApiError.
    """
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        for name in refused:
            if name in raw and bytes(raw[name]) not in NOTHING:
                raise invalid("is not supported", name)
        fields = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        place = PLACE.search(str(error))
        choices = choices_at(kind, place[1]) if place and INVALID_CHOICE in str(error) else []
        rest = f", must be one of {', '.join(choices)}" if choices else ""
        raise invalid(PLACE.sub("", str(error)) + rest, place[1] if place else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return Body(fields, raw, len(raw.keys() - known - {*refused, *without_meaning}))


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes, the limit")


__all__ = ["Body", "ClientDisconnect", "decode", "read_body"]

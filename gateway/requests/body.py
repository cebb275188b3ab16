"""Reads a request's body within limits of size and time, and decodes it."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info
from starlette.requests import Request

from gateway.byte_budget import OverBudget, Share
from gateway.errors import ApiError, invalid

RECEIVE_SECONDS = 30.0
UNCHECKED_BYTES = 64 << 10
"""A larger body is read only if the routers accept its token."""
RETRY_SECONDS = 1.0
PLACE = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
"""msgspec's error for a field of an object that allows no unknown fields."""
NAME = re.compile(r"\w+(?=[.\[]|$)")
"""The name of a field in a place such as `messages[0].role`."""
MAX_SHOWN = 64
INVALID_CHOICE = "Invalid enum value"
"""How msgspec's error for a value that is not among those of a Literal begins."""
NOTHING = frozenset((b"null", b"false", b'""', b"[]", b"{}"))
"""Values that mean the same as omitting the field."""
NEUTRAL = MappingProxyType(
    {
        "best_of": (b"1",),
        "top_logprobs": (b"0",),
        "length_penalty": (b"1", b"1.0"),
        "function_call": (b'"none"', b'"auto"'),
        "tool_choice": (b'"none"', b'"auto"'),
    }
)
"""By field: further values that mean the same as omitting it."""

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    fields: T
    raw: dict[str, msgspec.Raw]
    """The fields of the body as the client sent them, not decoded."""
    unknown: frozenset[str]
    """Names of unknown fields."""


async def read_body(
    request: Request, max_bytes: int, share: Share, check_token: Callable[[], Awaitable[None]]
) -> bytes:
    """`share` is charged for the body. `check_token` is awaited before more than UNCHECKED_BYTES are read.

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
            if name in raw and (value := bytes(raw[name])) not in NOTHING and value not in NEUTRAL.get(name, ()):
                raise invalid("is not supported", name)
        fields = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return Body(fields, raw, frozenset(raw.keys() - known - {*refused, *without_meaning}))


def _invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    found, message = PLACE.search(str(error)), PLACE.sub("", str(error))
    place = found[1] if found else None
    if unknown := UNKNOWN.fullmatch(message):
        return invalid("is not a known field", f"{place}.{unknown[1][:MAX_SHOWN]}")
    if place and INVALID_CHOICE in message:
        choices = _choices_at(kind, place)
        message += f", must be one of {', '.join(choices)}" if choices else ""
    return invalid(message, place)


def _choices_at(kind: type[msgspec.Struct], place: str) -> list[str]:
    """The values that the Literal at `place` allows, in a body of the type `kind`; empty if no Literal is there."""
    types: list[Type] = [type_info(kind)]
    for name in NAME.findall(re.sub(r"\[[^\]]*\]", "", place)):
        structs = [each for each in _parts(types) if isinstance(each, StructType)]
        types = [field.type for struct in structs for field in struct.fields if field.encode_name == name]
    return [str(value) for each in _parts(types) if isinstance(each, LiteralType) for value in each.values]


def _parts(types: Iterable[Type]) -> Iterator[Type]:
    """The types, with those of the alternatives of unions and of the items of lists."""
    for each in types:
        if isinstance(each, UnionType):
            yield from _parts(each.types)
        elif isinstance(each, ListType):
            yield from _parts([each.item_type])
        else:
            yield each


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes, the limit")

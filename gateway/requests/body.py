"""Reads a request's body, bounded in size and time, and decodes it."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.errors import ApiError, invalid

RECEIVE_SECONDS = 30.0
PLACE = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
NOTHING = frozenset((b"null", b"false", b'""', b"[]", b"{}"))
"""Values that ask for nothing."""

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    fields: T
    raw: dict[str, msgspec.Raw]
    """The same, each field as it was written."""
    unknown: int
    """Fields that nothing is known of."""


async def read_body(request: Request, most: int) -> bytes:
    """Raises ApiError, ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    found = bytearray()
    try:
        async with asyncio.timeout(RECEIVE_SECONDS):
            async for part in request.stream():
                found += part
                if len(found) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {RECEIVE_SECONDS:g} s", "timeout_error") from None
    return bytes(found)


def decode(data: bytes, kind: type[T], refused: Iterable[str] = (), without_meaning: Iterable[str] = ()) -> Body[T]:
    """`refused`: fields that would change the answer and are not built; `without_meaning`: such as change nothing here.

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
        raise invalid(PLACE.sub("", str(error)), place[1] if place else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    known = {each.encode_name for each in msgspec.structs.fields(kind)}
    return Body(fields, raw, len(raw.keys() - known - {*refused, *without_meaning}))


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes, the most that is accepted")


__all__ = ["Body", "ClientDisconnect", "decode", "read_body"]

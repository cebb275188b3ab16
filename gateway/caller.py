"""The id of an HTTP request, and the headers that are forwarded to the ring."""

import hashlib
import re
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers

from gateway.errors import invalid
from sluice.client import Metadata

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,120}", re.ASCII)
"""Shorter than the ring's limit, because the id of each prompt of a list gets a number appended."""
FORWARDED = ("authorization", "traceparent", "tracestate", "x-sluice-tenant")
TOKEN_DIGITS = 16
VALUE = re.compile(r"[\x20-\x7e]{0,8192}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    request_id: str
    metadata: Metadata
    token: str
    """The beginning of the SHA-256 of `Authorization`, for logs and limits. Empty without the header."""


def caller_of(headers: Headers) -> Caller:
    """Raises ApiError."""
    request_id = headers.get("x-request-id") or uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(request_id):
        raise invalid("must be 1 to 120 characters of [A-Za-z0-9._:-]", "x-request-id")
    metadata = tuple((name, headers[name]) for name in FORWARDED if name in headers)
    for name, value in metadata:
        if not VALUE.fullmatch(value):
            raise invalid("must be printable ASCII, at most 8192 characters", name)
    authorization = headers.get("authorization", "")
    token = hashlib.sha256(authorization.encode()).hexdigest()[:TOKEN_DIGITS] if authorization else ""
    return Caller(request_id, metadata, token)

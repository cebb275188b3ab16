"""Pages of list calls, after https://google.aip.dev/158. An opaque token names the last item of the previous page."""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from router.errors import Reason, RequestError, shown

DEFAULT_PAGE, LONGEST_PAGE = 100, 1000
MAX_TOKEN_CHARS = 2048

T = TypeVar("T")


class ListRequest(Protocol):
    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


def page_of(items: Iterable[T], name: Callable[[T], str], request: ListRequest) -> tuple[list[T], str]:
    """The items of a page, sorted by name, and the token of the next page; empty if this is the last page.

    Items that are added or removed between two calls may be missing; all others are listed once. Raises RequestError.
    """
    size = request.page_size or DEFAULT_PAGE
    if size > LONGEST_PAGE:
        raise RequestError.at("page_size", f"is {size}, must be at most {LONGEST_PAGE}", reason=Reason.OUT_OF_RANGE)
    # Part of the token, so that tokens of other calls are invalid.
    kind = type(request).__name__
    last = _read(kind, request.page_token)
    remaining = sorted((item for item in items if last is None or name(item) > last), key=name)
    page = remaining[:size]
    return page, _token(kind, name(page[-1])) if len(remaining) > size else ""


def _token(kind: str, last: str) -> str:
    return urlsafe_b64encode(f"{kind}:{last}".encode()).decode()


def _read(kind: str, token: str) -> str | None:
    if not token:
        return None
    try:
        data = urlsafe_b64decode(token.encode()) if len(token) <= MAX_TOKEN_CHARS else b""
        token_kind, separator, last = data.decode().partition(":")
    except (binascii.Error, ValueError):
        token_kind = separator = last = ""
    # Compare with the encoded token, because decoding ignores characters outside the base64 alphabet.
    if not separator or token_kind != kind or _token(kind, last) != token:
        description = f"is {shown(token)}, must be the next_page_token of the previous response of this call"
        raise RequestError.at("page_token", description, private=True, reason=Reason.INVALID_FORMAT)
    return last

"""Parts of a message's content: text, and images as data: URLs."""

import base64
import binascii
import re
from typing import Any

import msgspec

from gateway.errors import invalid

DATA_URL = re.compile(r"data:image/[a-z+.-]+;base64,", re.ASCII)
"""The URL's media type does not matter: the ring detects the format from the image itself."""


class ImageUrl(msgspec.Struct):
    url: str


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """Text in which the model refused to answer."""
    image_url: ImageUrl | None = None

    def for_ring(self, place: str) -> dict[str, Any]:
        """The part in the format of `sluice.client`. Raises ApiError."""
        if self.type == "text" and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "refusal" and self.refusal is not None:
            return {"type": "text", "text": self.refusal}
        if self.type == "image_url" and self.image_url is not None:
            return {"type": "image", "data": _decode(self.image_url.url, f"{place}.image_url.url")}
        raise invalid(
            f"has type {self.type[:64]!r}, must be text, refusal or image_url with the field of that name", place
        )


def content_for_ring(parts: list[ContentPart], place: str) -> str | list[dict[str, Any]]:
    """Parts that are all text are joined to one string, which every chat template supports. Raises ApiError."""
    content = [part.for_ring(f"{place}[{i}]") for i, part in enumerate(parts)]
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _decode(url: str, place: str) -> bytes:
    start = DATA_URL.match(url)
    if start is None:
        raise invalid("is not a data: URL of an image in base64; other URLs are not fetched", place)
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except binascii.Error as error:
        raise invalid(f"is not valid base64: {error}", place) from error

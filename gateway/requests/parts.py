"""Parts of a message's content: text, and images as data: URLs."""

import base64
import binascii
import re
from typing import Any

import msgspec

from gateway.errors import invalid

DATA_URL = re.compile(r"data:image/[a-z+.-]+;base64,", re.ASCII)
"""The ring looks at the image itself, whatever type the URL says."""


class ImageUrl(msgspec.Struct):
    url: str


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """Of the model, in place of an answer."""
    image_url: ImageUrl | None = None

    def for_ring(self, place: str) -> dict[str, Any]:
        """As `sluice.client` has parts. Raises ApiError."""
        if self.type == "text" and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "refusal" and self.refusal is not None:
            return {"type": "text", "text": self.refusal}
        if self.type == "image_url" and self.image_url is not None:
            return {"type": "image", "data": _decode(self.image_url.url, f"{place}.image_url.url")}
        raise invalid(
            f"is of type {self.type[:64]!r}, only text, refusal and image_url are supported, each with its field", place
        )


def content_for_ring(parts: list[Part], place: str) -> str | list[dict[str, Any]]:
    """Text alone is one text, which every chat template can place. Raises ApiError."""
    found = [part.for_ring(f"{place}[{i}]") for i, part in enumerate(parts)]
    if all(part["type"] == "text" for part in found):
        return "\n".join(part["text"] for part in found)
    return found


def _decode(url: str, place: str) -> bytes:
    start = DATA_URL.match(url)
    if start is None:
        raise invalid("is no data: URL of an image in base64; others are not fetched", place)
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except binascii.Error as error:
        raise invalid(f"is not valid base64: {error}", place) from error

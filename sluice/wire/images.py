"""Images on the ring: encoded pictures from which an engine computes rows of embeddings."""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_IMAGES = 16
"""Maximum number of images in a request."""
MAX_IMAGE_BYTES = 8 << 20
"""Maximum size of all images of a request, less than the limits of a lane's frame and of a gRPC message."""
MAX_PIXELS = 1 << 24
"""Maximum size of a decoded image, such as 4096 x 4096. A file of a few kilobytes may decode to gigabytes."""
FORMATS = ("PNG", "JPEG", "WEBP")
"""Pillow's names of the decoders that may be used."""
DIGEST_BYTES = 16

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Size = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt, where it takes the place of as many tokens as it has rows."""

    digest: Digest
    """Digest of the fields below, which block hashes include. What the model makes of the data is covered by the
    model's fingerprint."""
    rows: Size
    data: memoryview
    """A file in one of FORMATS. If it contains several pictures, the first is used."""
    columns: Count = 0
    """Number of columns of the grid in which the rows have positions. 0: rows have positions like tokens."""

    def __post_init__(self) -> None:
        if self.columns and self.rows % self.columns:
            raise ValueError(f"an image of {self.rows} rows cannot have a grid of {self.columns} columns")

    @staticmethod
    def of(rows: int, data: bytes | memoryview, columns: int = 0) -> "Image":
        """An image with its digest, which takes a millisecond per megabyte."""
        return Image(_digest(rows, data, columns), rows, memoryview(data), columns)

    @property
    def intact(self) -> bool:
        """Whether the digest matches the data. Takes as long as `of`."""
        return self.digest == _digest(self.rows, self.data, self.columns)


def _digest(rows: int, data: bytes | memoryview, columns: int) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"sluice-image")
    # Of fixed length. Otherwise another shape could yield the same bytes.
    digest.update(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))
    digest.update(data)
    return digest.digest()

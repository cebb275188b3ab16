"""Images on the ring: encoded pictures, whose rows of embeddings an engine computes."""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_IMAGES = 16
"""In a request."""
MAX_IMAGE_BYTES = 8 << 20
"""Of all images of a request: less than a frame of a lane, or a message of gRPC, may have."""
MAX_PIXELS = 1 << 24
"""Of an image once it is decoded, such as 4096 x 4096: a file of some kilobytes may decode to gigabytes."""
FORMATS = ("PNG", "JPEG", "WEBP")
"""Names that Pillow gives to the decoders that may be used."""
DIGEST_BYTES = 16

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Size = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class Image(msgspec.Struct, frozen=True, array_like=True):
    """It stands in a prompt for as many tokens as it has rows."""

    digest: Digest
    """Of everything below: what block hashes cover. The fingerprint of the model covers what it makes of the data."""
    rows: Size
    data: memoryview
    """A file of one of FORMATS; of several pictures in it the first counts."""
    columns: Count = 0
    """Its rows have places in a grid with so many of them in a line; 0: they have positions like tokens."""

    def __post_init__(self) -> None:
        if self.columns and self.rows % self.columns:
            raise ValueError(f"{self.rows} rows in lines of {self.columns}")

    @staticmethod
    def of(rows: int, data: bytes | memoryview, columns: int = 0) -> "Image":
        """Takes a millisecond per megabyte, for the digest."""
        return Image(_digest(rows, data, columns), rows, memoryview(data), columns)

    @property
    def intact(self) -> bool:
        """Whether the digest is that of the data; it takes as long as `of`."""
        return self.digest == _digest(self.rows, self.data, self.columns)


def _digest(rows: int, data: bytes | memoryview, columns: int) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"sluice-image")
    # Of fixed length: otherwise another shape could give the same bytes.
    digest.update(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))
    digest.update(data)
    return digest.digest()

"""Decodes images that clients sent. The only module of the services that imports Pillow."""

from io import BytesIO
from typing import BinaryIO

import PIL.ExifTags
import PIL.Image
import PIL.ImageOps
from PIL.Image import Image as Picture

from sluice.wire.tables import FORMATS, MAX_PIXELS

FORMAT_NAMES = "PNG, JPEG or WebP"
MAX_EXIF_BYTES = 1 << 16
"""The limit that JPEG has: the size of one segment."""
SIDEWAYS = range(5, 9)
"""EXIF orientations that exchange width and height."""
MAX_PARTS = 4096
"""Limit on the segments before the pixels of a JPEG and, with one more per KiB of the file, on the chunks of a PNG."""
MAX_SCANS = 128
"""Limit on the scans of a progressive JPEG: decoding each takes as long as the whole picture. Ten are usual."""
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
START_OF_SCAN = 0xDA
WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
"""JPEG markers that are not followed by data."""


class PictureError(ValueError):
    """The data cannot or must not be decoded. The message continues a field's name with the reason."""


def open_picture(data: bytes | memoryview) -> Picture:
    """The first picture in a file, upright and in RGB, like transformers' `load_image`.

    Takes milliseconds per megapixel. Raises PictureError.
    """
    picture = _loaded(data)
    try:
        return PIL.ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # Decoders raise all kinds of exceptions for malformed data.
        raise PictureError(f"is broken or truncated: {error}") from error


def check_picture(data: bytes | memoryview) -> None:
    """Raises PictureError if the picture cannot be decoded. Takes as long as `open_picture`, but a third to two thirds
    of its memory, since it makes no upright copy in RGB."""
    _loaded(data)


def upright_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of the result of `open_picture`, read from the header. Takes 100 µs. Raises PictureError."""
    picture = _header(data)
    return (picture.height, picture.width) if _is_sideways(picture) else (picture.width, picture.height)


def _loaded(data: bytes | memoryview) -> Picture:
    picture = _header(data)
    _is_sideways(picture)
    try:
        picture.load()
    except Exception as error:  # Decoders raise all kinds of exceptions for malformed data.
        raise PictureError(f"is broken or truncated: {error}") from error
    return picture


def _is_sideways(picture: Picture) -> bool:
    """Whether the picture must be rotated by 90 degrees.

    Must be called before the pixels are read, so that EXIF data after the pixels is ignored.
    """
    exif = len(picture.info.get("exif", b""))
    if exif > MAX_EXIF_BYTES:
        raise PictureError(f"has {exif} bytes of EXIF data, at most {MAX_EXIF_BYTES} are allowed")
    try:
        # The method that PNG files override would read the pixels first. PIL caches the result of this one.
        orientation = Picture.getexif(picture).get(PIL.ExifTags.Base.Orientation, 1)
    except Exception as error:  # Decoders raise all kinds of exceptions for malformed data.
        raise PictureError(f"is broken: {error}") from error
    return orientation in SIDEWAYS


def _header(data: bytes | memoryview) -> Picture:
    """The picture, of which only the header has been read. Raises PictureError, also for too many parts or pixels."""
    if (problem := _too_many_parts(data)) is not None:
        raise PictureError(problem)
    picture = _opened(BytesIO(data))
    if picture.width * picture.height > MAX_PIXELS:
        size = f"{picture.width} x {picture.height}"
        raise PictureError(f"has {size} pixels, at most {MAX_PIXELS} are allowed")
    return picture


def _opened(file: BinaryIO) -> Picture:
    try:
        return PIL.Image.open(file, formats=FORMATS)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise PictureError(f"has too many pixels, at most {MAX_PIXELS} are allowed") from error
    except PIL.UnidentifiedImageError as error:
        raise PictureError(f"is not a {FORMAT_NAMES} image") from error
    except Exception as error:  # Decoders raise all kinds of exceptions for malformed data.
        raise PictureError(f"is broken: {error}") from error


def _too_many_parts(data: bytes | memoryview) -> str | None:
    """What the file has too many of; None if nothing. A decoder spends time on each. Takes up to a few milliseconds."""
    data = bytes(data)
    if data.startswith(PNG):
        limit = MAX_PARTS + (len(data) >> 10)
        return f"has more than {limit} chunks" if _has_more_chunks(data, limit) else None
    if data.startswith(JPEG):
        if data.count(bytes((0xFF, START_OF_SCAN))) > MAX_SCANS:
            return f"has more than {MAX_SCANS} scans"
        return f"has more than {MAX_PARTS} segments" if _has_more_segments(data) else None
    return None


def _has_more_chunks(data: bytes, limit: int) -> bool:
    at = len(PNG)
    for _ in range(limit):
        if at >= len(data):
            return False
        # Length, type, contents, checksum.
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return at < len(data)


def _has_more_segments(data: bytes) -> bool:
    at = len(JPEG)
    for _ in range(MAX_PARTS):
        if at + 1 >= len(data):
            return False
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            # Not a marker: decoders search for the next one.
            found = data.find(b"\xff", at + 1)
            if found < 0:
                return False
            at = found
        elif data[at + 1] == START_OF_SCAN:
            return False
        else:
            length = 0 if data[at + 1] in WITHOUT_LENGTH else int.from_bytes(data[at + 2 : at + 4], "big")
            at += 2 + length
    return True

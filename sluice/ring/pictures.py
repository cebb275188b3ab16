"""Decodes images that clients sent. Alone imports Pillow."""

from io import BytesIO
from typing import BinaryIO

import PIL.ExifTags
import PIL.Image
import PIL.ImageOps
from PIL.Image import Image as Picture

from sluice.ring.images import FORMATS, MAX_PIXELS

SHOWN = "PNG, JPEG or WebP"
LYING = range(5, 9)
"""Orientations of EXIF that exchange width and height."""


class PictureError(ValueError):
    """It cannot be decoded, or may not be; the message says why, after the name of a field."""


def open_picture(data: bytes | memoryview) -> Picture:
    """The first picture in a file, upright and in RGB, as transformers' `load_image` has it. Takes milliseconds per
    megapixel. Raises PictureError."""
    picture = _header(BytesIO(data))
    _lies(picture)
    try:
        picture.load()
        return PIL.ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # whatever a decoder makes of hostile bytes
        raise PictureError(f"is broken or truncated: {error}") from error


def upright_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of what `open_picture` returns, by the header. Takes some 100 µs. Raises PictureError."""
    picture = _header(BytesIO(data))
    return (picture.height, picture.width) if _lies(picture) else (picture.width, picture.height)


def _lies(picture: Picture) -> bool:
    """Whether it is to be turned by a quarter. Called before the pixels are read: what stands behind them does not
    count."""
    try:
        # The method of PNG files would read the pixels first. PIL keeps what this one has found.
        found = Picture.getexif(picture).get(PIL.ExifTags.Base.Orientation, 1)
    except Exception as error:  # whatever a decoder makes of hostile bytes
        raise PictureError(f"is broken: {error}") from error
    return found in LYING


def _header(file: BinaryIO) -> Picture:
    """Raises PictureError, also for too many pixels."""
    picture = _opened(file)
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
        raise PictureError(f"is no {SHOWN} image") from error
    except Exception as error:  # as above
        raise PictureError(f"is broken: {error}") from error

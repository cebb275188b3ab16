"""Image bombs: small files that take long to decode. Each is refused at once, with the reason."""

import io
import struct
import time
import zlib

import PIL.Image
import pytest

from sluice.pictures import PictureError, check_picture, upright_size
from sluice.wire.tables import MAX_IMAGE_BYTES

SECONDS = 2.0
"""Much more than each takes, and less than each took."""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(extra: bytes = b"", width: int = 8, height: int = 8, pixels: list[bytes] | None = None) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = [zlib.compress(bytes(height * (1 + 3 * width)))] if pixels is None else pixels
    return (
        b"\x89PNG\r\n\x1a\n" + header + extra + b"".join(chunk(b"IDAT", part) for part in parts) + chunk(b"IEND", b"")
    )


def jpeg(extra: bytes = b"", **options) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 8)).save(file, "JPEG", **options)
    return file.getvalue()[:2] + extra + file.getvalue()[2:]


def scans(count: int) -> bytes:
    """A progressive JPEG with its last scan repeated."""
    data = jpeg(progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * count + data[-2:]


def exif(count: int) -> bytes:
    entry = struct.pack("<HHII", 0x112, 4, 1, 1)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", count) + entry * count + bytes(4)


BOMBS = {
    "texts": (lambda: png(chunk(b"tEXt", b"k\0v") * (MAX_IMAGE_BYTES // 20)), "has more than 1"),
    "pixels in pieces": (lambda: png(pixels=[b""] * (MAX_IMAGE_BYTES // 20)), "has more than 9"),
    "segments": (lambda: jpeg(b"\xff\xe5\0\x02" * (MAX_IMAGE_BYTES // 8)), "has more than 4096 segments"),
    "fill bytes": (lambda: jpeg(b"\xff\xe5\0\x03x\xff\xff" * (MAX_IMAGE_BYTES // 8)), "has more than 4096 segments"),
    "scans": (lambda: scans(100_000), "has more than 128 scans"),
    "EXIF": (lambda: png(chunk(b"eXIf", exif(65535))), "bytes of EXIF data, at most 65536 are allowed"),
    "size": (lambda: png(width=1 << 15, height=1 << 15, pixels=[b""]), "has too many pixels"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='1e9'/>", "is not a PNG, JPEG or WebP image"),
    "GIF before a JPEG": (lambda: b"GIF89a" + jpeg(), "is not a PNG, JPEG or WebP image"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_at_once(name):
    make, reason = BOMBS[name]
    data = make()
    began = time.process_time()
    for check in (upright_size, check_picture):
        with pytest.raises(PictureError, match=reason):
            check(data)
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "data", [jpeg(progressive=True), png(), scans(8), png(chunk(b"tEXt", b"k\0v") * 100)], ids=range(4)
)
def test_usual_files_are_decoded(data):
    check_picture(data)
    assert upright_size(data) == (8, 8)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_only_the_first_frame_of_an_animation_is_decoded(kind):
    frames = [PIL.Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(200)]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    began = time.process_time()
    check_picture(file.getvalue())
    assert time.process_time() - began < SECONDS / 20

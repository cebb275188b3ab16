"""Pictures of all formats, and malformed or malicious ones."""

import contextlib
import struct
import zlib
from io import BytesIO

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pictures import PictureError, check_picture, open_picture, upright_size
from sluice.wire.tables import MAX_PIXELS
from tests.examples import examples


def encoded(form: str, mode: str = "RGB", size: tuple[int, int] = (9, 7), **options) -> bytes:
    file = BytesIO()
    PIL.Image.effect_noise(size, 90).convert(mode).save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int) -> bytes:
    """A file whose header claims this size, with little data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("PNG", "LA"),
        ("PNG", "1"),
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("WEBP", "RGBA"),
    ],
)
def test_every_mode_becomes_rgb(form, mode):
    picture = open_picture(encoded(form, mode))
    assert (picture.mode, picture.size) == ("RGB", (9, 7))


def test_a_picture_is_rotated_upright():
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    assert open_picture(encoded("JPEG", exif=exif)).size == (7, 9)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_the_upright_size_is_read_from_the_header(form, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = encoded(form, exif=exif)
    assert upright_size(data) == open_picture(data).size == ((7, 9) if 5 <= orientation <= 8 else (9, 7))


def test_an_orientation_after_the_pixels_is_ignored():
    """If it were applied, the size could not be read from the header."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    parts = dict(chunks(encoded("PNG", exif=exif)))
    order = (b"IHDR", b"IDAT", b"eXIf", b"IEND")
    data = encoded("PNG")[:8] + b"".join(parts[name] for name in order)
    assert upright_size(data) == open_picture(data).size == (9, 7)


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG file by name."""
    parts, at = [], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        parts.append((data[at + 4 : at + 8], data[at:end]))
        at = end
    return parts


def test_the_first_of_several_pictures_is_used():
    frames = [PIL.Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    file = BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    assert open_picture(file.getvalue()).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("data", [b"", b"GIF89a", encoded("GIF", "P"), encoded("BMP"), encoded("TIFF"), b"<svg/>"])
def test_other_formats_are_refused(data):
    with pytest.raises(PictureError, match="is not a PNG, JPEG or WebP image"):
        open_picture(data)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_truncated_pictures_are_refused(form):
    data = encoded(form, size=(64, 64))
    for size in range(20, len(data) - 2, len(data) // 9):
        with pytest.raises(PictureError):
            open_picture(data[:size])


@pytest.mark.parametrize("size", [(MAX_PIXELS + 1, 1), (4097, 4096), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused_before_decoding(size):
    with pytest.raises(PictureError, match=r"pixels, at most|is broken"):
        open_picture(png(*size))


SAMPLES = {form: encoded(form) for form in ("PNG", "JPEG", "WEBP")}


@examples(200)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_corrupted_pictures_raise_only_picture_errors(form, data):
    corrupted = bytearray(SAMPLES[form])
    for _ in range(data.draw(st.integers(1, 4))):
        corrupted[data.draw(st.integers(0, len(corrupted) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PictureError):
        picture = open_picture(bytes(corrupted))
        assert picture.mode == "RGB"
        assert picture.size == upright_size(bytes(corrupted))


@pytest.mark.parametrize(("kind", "head"), [(b"iCCP", b"x\0\0"), (b"zTXt", b"x\0\0"), (b"iTXt", b"x\0\1\0\0\0")])
def test_compressed_metadata_that_expands_to_megabytes_is_refused(kind, head):
    good, data = png(9, 7), head + zlib.compress(bytes(50 << 20))
    bomb = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for read in (check_picture, upright_size):
        with pytest.raises(PictureError, match="is broken: Decompressed data too large"):
            read(good[:33] + bomb + good[33:])


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_of_an_animation_only_the_first_picture_counts(form):
    file = BytesIO()
    first, *others = (PIL.Image.new("RGB", (90, 70), (i, 0, 0)) for i in range(20))
    first.save(file, form, save_all=True, append_images=others)
    assert open_picture(file.getvalue()).getpixel((0, 0))[0] <= 1


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_checked_as_it_is_decoded(form):
    data = encoded(form)
    check_picture(data)
    for size in range(0, len(data), 7):
        outcomes = []
        for read in (check_picture, open_picture):
            try:
                read(data[:size])
                outcomes.append("")
            except PictureError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

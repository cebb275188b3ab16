"""A frame of a lane: a fixed header (magic, version, the lane's epoch, the frame's number in it) and a message."""

import struct
from typing import NamedTuple

from sluice.ring.message import VERSION

MAGIC = b"SL"
HEADER = struct.Struct("<2sHQQ")
MAX_FRAME_BYTES = 32 << 20
MAX_FRAME_NUMBER = 1 << 40
"""At a thousand a second a lane needs 34 years for these."""


class Frame(NamedTuple):
    """The message is encoded still."""

    lane: int
    number: int
    message: memoryview


def header(lane: int, number: int) -> bytes:
    """What stands before the message."""
    return HEADER.pack(MAGIC, VERSION, lane, number)


def open_frame(frame: bytes) -> Frame:
    """Raises ValueError for what is no frame of this version."""
    if len(frame) < HEADER.size:
        raise ValueError("shorter than a header")
    magic, version, lane, number = HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION or number > MAX_FRAME_NUMBER:
        raise ValueError("not a frame of this version")
    return Frame(lane, number, memoryview(frame)[HEADER.size :])

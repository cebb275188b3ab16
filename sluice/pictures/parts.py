"""The parts of an image file, counted before a decoder spends time on each."""

MAX_PARTS = 4096
"""Limit on the segments before the pixels of a JPEG and, with one more per KiB of the file, on the chunks of a PNG."""
MAX_SCANS = 128
"""Limit on the scans of a progressive JPEG: decoding each takes as long as the whole picture. Usual are ten."""
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
START_OF_SCAN = 0xDA
WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers of a JPEG that no data follow."""


def too_many_parts(data: bytes | memoryview) -> str | None:
    """What the file has too many of, if anything. Takes up to some milliseconds."""
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

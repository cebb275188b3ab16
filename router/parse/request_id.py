"""The id of a request, chosen by the caller or generated."""

import os
import re
import time

from router.errors import Reason, Violations, shown

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


def parse_request_id(text: str, bad: Violations) -> str:
    """The caller's id, or a new one if `text` is empty."""
    if text and not REQUEST_ID.fullmatch(text):
        bad.add(
            "spec.request_id",
            f"is {shown(text)}, must be at most 128 characters of [A-Za-z0-9._:-]",
            reason=Reason.INVALID_FORMAT,
        )
    return text or new_request_id()


def new_request_id() -> str:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    # Set the version to 7 and the variant to 0b10.
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

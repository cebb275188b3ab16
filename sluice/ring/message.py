"""What all messages of the ring have in common."""

import msgspec

VERSION = 3
"""Grows with every incompatible change; a lane refuses frames of another version."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that a lane carries."""

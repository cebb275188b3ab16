"""The result of appending something that arrived over the ring."""

from enum import Enum


class Appended(Enum):
    TAKEN = 0
    """It was new and has been appended."""
    SEEN = 1
    """All of it had arrived before, or is no longer wanted; nothing was appended."""
    HOLE = 2
    """Something that precedes it is missing; nothing was appended."""

"""What became of something that came over the ring."""

from enum import Enum


class Appended(Enum):
    TAKEN = 0
    SEEN = 1
    """All of it had come before, or is no longer wanted."""
    HOLE = 2
    """Something before it is missing."""

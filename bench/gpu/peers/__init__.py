"""Other systems on the same shape with random weights, each in its own process."""

MARK = "measured: "
"""Prefix of the child's lines: libraries print too."""

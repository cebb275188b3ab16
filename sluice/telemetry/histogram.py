"""Counts of values by size, cheap enough for every step and every row."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """One thread writes, any may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of all buckets but the last, which has none; in ascending order."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, times: int = 1) -> None:
        """A value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

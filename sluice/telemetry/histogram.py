"""A histogram that is cheap enough to update in every step and for every row."""

# Not in metrics.py, because the engine's core must not import prometheus_client.
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket. One thread writes, any thread may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds of all buckets except the last, which is unbounded."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

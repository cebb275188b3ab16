"""A histogram that is cheap enough to update in every step and for every row, and tokens per second, measured in the
same way by all services."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

RATE_SECONDS = 1.0
"""Time over which tokens per second are averaged."""


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


class Rate:
    """Tokens per second over the last RATE_SECONDS, or over the last period if that took longer."""

    def __init__(self) -> None:
        self._periods: deque[tuple[float, float, int]] = deque()
        self._tokens = 0

    def add(self, start: float, end: float, tokens: int) -> None:
        """Count the tokens of a period, such as a step."""
        self._periods.append((start, end, tokens))
        self._tokens += tokens

    def at(self, now: float) -> float:
        """Tokens per second at `now`, which must not decrease between calls."""
        while self._periods and self._periods[0][1] <= now - RATE_SECONDS:
            self._tokens -= self._periods.popleft()[2]
        return self._tokens / max(RATE_SECONDS, now - self._periods[0][0]) if self._periods else 0.0

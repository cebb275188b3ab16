"""The documented ranges of the sampling scalars."""

import math
from typing import NamedTuple


class Range(NamedTuple):
    """From low to high, both included unless `above` is set: then low itself is out."""

    low: float
    high: float
    above: bool = False

    def problem(self, value: float) -> str | None:
        """What is wrong with the value; None where it is fine. NaN and infinities are never fine."""
        if math.isfinite(value) and value <= self.high and (value > self.low if self.above else value >= self.low):
            return None
        return f"is {value:g}, must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
LOGIT_BIAS_RANGE = Range(-100, 100)

"""The ranges of sampling parameters, which requests and their defaults have in common."""

import math
from typing import NamedTuple


class Range(NamedTuple):
    """A closed interval; if `above` is set, it excludes `low`."""

    low: float
    high: float
    above: bool = False

    def problem(self, value: float) -> str | None:
        """Why the value is out of range; None if it is in range. NaN and infinities are always out of range."""
        if math.isfinite(value) and value <= self.high and (value > self.low if self.above else value >= self.low):
            return None
        number = value if isinstance(value, int) else f"{value:g}"
        return f"is {number}, must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
TOP_K = "top_k"
DEFAULT_NAMES = (*SAMPLING_RANGES, TOP_K)
"""The parameters that have a default of the model or of the server."""


def default_problem(name: str, value: object) -> str | None:
    """What is wrong with the default of a parameter in DEFAULT_NAMES; None if it can be used."""
    if name == TOP_K:
        is_count = not isinstance(value, bool) and isinstance(value, int | float) and value >= 0 and value % 1 == 0
        return None if is_count else f"is {value!r}, must be an integer of at least 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {value!r}, must be a number"
    return SAMPLING_RANGES[name].problem(value)

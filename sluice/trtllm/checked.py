"""Options whose values are checked when they are set, in the constructor and later."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from sluice.trtllm.errors import OptionError


class Limit(NamedTuple):
    holds: Callable[[Any], bool]
    """Whether a value is within the limit."""
    text: str
    """The limit in words, after "must be"."""


POSITIVE = Limit(lambda value: value > 0, "above 0")
NOT_NEGATIVE = Limit(lambda value: value >= 0, "at least 0")
ALL_POSITIVE = Limit(lambda values: all(value > 0 for value in values), "numbers above 0")
FRACTION = Limit(lambda value: 0 < value < 1, "above 0 and below 1")
ABOVE_0_TO_1 = Limit(lambda value: 0 < value <= 1, "above 0 and at most 1")
FROM_0_TO_1 = Limit(lambda value: 0 <= value <= 1, "from 0 to 1")
NOT_EMPTY = Limit(lambda value: len(value) > 0, "not empty")
MATRIX = Limit(lambda value: len(value.shape) == 2, "a tensor of two dimensions")
VECTOR = Limit(lambda value: len(value.shape) == 1, "a tensor of one dimension")


def from_to(low: int, high: int) -> Limit:
    return Limit(lambda value: low <= value <= high, f"from {low} to {high}")


class Checked:
    """Base of options with LIMITS. Setting a field to a value out of its limit raises OptionError; None is allowed."""

    LIMITS: ClassVar[Mapping[str, Limit]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        limit = self.LIMITS.get(name)
        if limit is not None and value is not None and not _holds(limit, value):
            raise OptionError(f"{type(self).__name__}.{name} is {value!r}, must be {limit.text}")
        super().__setattr__(name, value)


def _holds(limit: Limit, value: Any) -> bool:
    try:
        return limit.holds(value)
    except (TypeError, AttributeError):
        # A value of another type, such as a text in place of a number.
        return False

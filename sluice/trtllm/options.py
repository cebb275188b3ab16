"""Options whose values are checked when they are set, and the errors of options."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple


class OptionError(RuntimeError, ValueError):
    """An option's value is out of range. Also a RuntimeError, which TensorRT-LLM raises."""


class UnsupportedOptionError(NotImplementedError):
    """An option of TensorRT-LLM that Sluice does not support, or supports only with its default value.

    The message names the option and the reason.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.option, self._reason)


def refuse_changed(owner: object, defaults: object, reasons: dict[str, str]) -> None:
    """Raise UnsupportedOptionError for the first attribute in `reasons` whose value differs from that of `defaults`."""
    for name, reason in reasons.items():
        value, default = getattr(owner, name), getattr(defaults, name)
        # `value != default` is evaluated last, because tensors compare by element.
        if value is not default and (default is None or value != default):
            raise UnsupportedOptionError(f"{type(owner).__name__}.{name} = {value!r}", reason)


def refuse_added(owner: Any) -> None:
    """Raise UnsupportedOptionError for an attribute that a program has set and that is not a field of the dataclass."""
    names = {field.name for field in fields(owner)}
    for name, value in vars(owner).items():
        if name not in names:
            raise UnsupportedOptionError(f"{type(owner).__name__}.{name} = {value!r}", "unknown option")


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

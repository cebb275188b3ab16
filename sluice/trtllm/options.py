"""What all classes of options share: their errors, and the annotations of their fields.

`Annotated` gives a field its `Limit`, the reason why it is `Unsupported`, or NO_EFFECT.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

T = TypeVar("T")


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


class Unsupported(NamedTuple):
    """Annotation of a field for which only the default is supported."""

    reason: str


NO_EFFECT: Final = "no effect"
"""Annotation of a field that affects only TensorRT-LLM's speed; setting it is logged."""


def _marks(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())


def refuse_changed(owner: Any) -> None:
    """Raise UnsupportedOptionError for the first `Unsupported` field whose value is not its default."""
    kind: Any = type(owner)
    for name, default, reason in _unsupported(kind):
        value = getattr(owner, name)
        # `value != default` is evaluated last, because tensors compare by element.
        if value is not default and (default is None or value != default):
            raise UnsupportedOptionError(f"{type(owner).__name__}.{name} = {value!r}", reason)


@cache
def _unsupported(kind: Any) -> list[tuple[str, Any, str]]:
    return [
        (field.name, field.default, mark.reason)
        for field in fields(kind)
        for mark in _marks(field.type)
        if isinstance(mark, Unsupported)
    ]


def changed_without_effect(owner: Any) -> list[str]:
    """The names of the fields with NO_EFFECT whose value is not their default."""
    marked = [field for field in fields(owner) if NO_EFFECT in _marks(field.type)]
    return [field.name for field in marked if getattr(owner, field.name) != field.default]


def refuse_added(owner: Any) -> None:
    """Raise UnsupportedOptionError for an attribute that a program has set and that is not a field of the dataclass."""
    names = {field.name for field in fields(owner)}
    for name, value in vars(owner).items():
        if name not in names:
            raise UnsupportedOptionError(f"{type(owner).__name__}.{name} = {value!r}", "unknown option")


def translated(kind: Callable[..., T], source: Any, **given: Any) -> T:
    """A `kind` whose fields have the values that are `given`, or else those of the same-named fields of `source`."""
    names = [field.name for field in fields(kind) if hasattr(source, field.name)]  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names} | given)


class Limit(NamedTuple):
    """Annotation of a field of `Checked` options."""

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
    """Base class of options whose fields have limits, which `Annotated` gives.

    Setting a field to a value outside its limit raises OptionError. None is always allowed.
    """

    _limits: ClassVar[dict[str, Limit]] = {}

    def __init_subclass__(cls) -> None:
        marks = ((name, mark) for name, kind in cls.__annotations__.items() for mark in _marks(kind))
        cls._limits = cls._limits | {name: mark for name, mark in marks if isinstance(mark, Limit)}

    def __setattr__(self, name: str, value: Any) -> None:
        limit = self._limits.get(name)
        if limit is not None and value is not None and not _holds(limit, value):
            raise OptionError(f"{type(self).__name__}.{name} is {value!r}, must be {limit.text}")
        super().__setattr__(name, value)


def _holds(limit: Limit, value: Any) -> bool:
    try:
        return limit.holds(value)
    except (TypeError, AttributeError):
        # A value of another type, such as a text in place of a number.
        return False

"""Errors of options: values out of range, and unsupported options."""

from dataclasses import fields
from typing import Any


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

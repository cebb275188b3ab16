"""Errors of options: values out of range, and options that have no meaning here."""

from dataclasses import fields
from typing import Any


class OptionError(RuntimeError, ValueError):
    """A value out of range. TensorRT-LLM raises RuntimeError for these."""


class UnsupportedOptionError(NotImplementedError):
    """An option that is not honoured here, or only by its default value; the message names it and the reason."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option


def refuse_changed(owner: object, defaults: object, reasons: dict[str, str]) -> None:
    """Raise UnsupportedOptionError for the first attribute in `reasons` that differs from that of `defaults`."""
    for name, reason in reasons.items():
        value, default = getattr(owner, name), getattr(defaults, name)
        # Tensors compare by element.
        if value is not default and (default is None or value != default):
            raise UnsupportedOptionError(f"{type(owner).__name__}.{name} = {value!r}", reason)


def refuse_added(owner: Any) -> None:
    """Raise UnsupportedOptionError for an attribute that is no field of this dataclass: a program set it."""
    names = {each.name for each in fields(owner)}
    for name, value in vars(owner).items():
        if name not in names:
            raise UnsupportedOptionError(f"{type(owner).__name__}.{name} = {value!r}", "there is no such option")

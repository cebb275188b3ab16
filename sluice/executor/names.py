"""Checks of arguments: those that have a second name in TensorRT-LLM, and those that name things on the server."""

from typing import Any


def either(name: str, value: Any, alias: str, aliased: Any) -> Any:
    """The value of an argument with two names. Raises TypeError if both are missing or they differ."""
    if value is None and aliased is None:
        raise TypeError(f"{name} (or its alias {alias}) is missing")
    if value is not None and aliased is not None and value != aliased:
        raise TypeError(f"{name} and {alias} are the same argument: give one of them")
    return aliased if value is None else value


def check_name(argument: str, value: object, expected: str) -> None:
    """Raises TypeError unless `value` is a string, for instance if it is the class itself."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be {expected}, which another process looks up; it is {value!r}")

"""Arguments that TensorRT-LLM names otherwise, and arguments that are names of things on the server."""

from typing import Any


def either(name: str, value: Any, alias: str, aliased: Any) -> Any:
    """The value of an argument with two names. Raises TypeError unless it is given, and once or the same twice."""
    if value is None and aliased is None:
        raise TypeError(f"{name} is missing (or {alias}, which is the same)")
    if value is not None and aliased is not None and value != aliased:
        raise TypeError(f"{name} and {alias} are the same argument: give one of them, not two values")
    return aliased if value is None else value


def check_name(argument: str, value: object, expected: str) -> None:
    """Raises TypeError for anything but a string, such as the function or class itself."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be {expected}, which another process looks up; it is {value!r}")

"""Users' schedulers, by their names in the settings."""

from collections.abc import Callable
from typing import Any

from engine_worker.scheduling.context import SchedulerContext
from sluice.ring.names import find


class SchedulerLoadError(ValueError):
    """A setting names a scheduler that cannot be used; the message has setting, value and reason."""

    def __init__(self, setting: str, value: str, reason: object) -> None:
        super().__init__(f"{setting}: {value!r} cannot be used: {reason}")


def find_class(setting: str, value: str, method: str, base: type = object) -> Callable[[SchedulerContext], Any]:
    """The class that `module:Class` names. It must have this method and base. Raises SchedulerLoadError."""
    try:
        found = find(value)
    except ValueError as error:
        raise SchedulerLoadError(setting, value, error) from error
    if not isinstance(found, type):
        raise SchedulerLoadError(setting, value, "it is no class")
    if not issubclass(found, base):
        raise SchedulerLoadError(setting, value, f"it is not a subclass of {base.__name__}")
    if not callable(getattr(found, method, None)):
        raise SchedulerLoadError(setting, value, f"it has no method {method}")
    return found


def make(setting: str, value: str, found: Callable[[SchedulerContext], Any], context: SchedulerContext) -> Any:
    """An instance of a class that was found. Raises SchedulerLoadError."""
    try:
        return found(context)
    except Exception as error:
        raise SchedulerLoadError(setting, value, f"making it failed: {type(error).__name__}: {error}") from error

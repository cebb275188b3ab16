"""The result of work that the caller's thread has done immediately."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Finished(Generic[T]):
    """Used in place of a Future, whose locks take microseconds."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: Any, error: Exception | None = None) -> None:
        self._value = value
        self._error = error

    @classmethod
    def of(cls, work: Callable[..., T], *arguments: Any) -> "Finished[T]":
        """Do the work. If it raises, `result` raises the same exception."""
        try:
            return cls(work(*arguments))
        except Exception as error:  # noqa: BLE001 - raised when the step is collected, as it is with overlap
            return cls(None, error)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def done(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self._error

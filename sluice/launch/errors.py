"""Errors of a ring."""

from collections.abc import Sequence


class OptionsError(ValueError):
    """Options of a ring that contradict each other, or do not fit this machine."""


class RingError(RuntimeError):
    """A ring or a service could not start. `tail` holds the last log lines of the child at fault."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        self.tail = tuple(tail)
        super().__init__("\n".join([message, *self.tail]))
        self.message = message

"""Errors of a ring while it starts or runs."""

from collections.abc import Sequence


class RingError(RuntimeError):
    """A ring or a service could not start. `tail` holds the last log lines of the child at fault."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        self.tail = tuple(tail)
        super().__init__("\n".join([message, *self.tail]))
        self.message = message

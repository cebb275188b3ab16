"""One running service as its supervisor sees it, wherever it runs."""

from collections import deque
from typing import Protocol

TAIL_LINES = 40


class Child(Protocol):
    """A process that was started once. Its end is reported by the `ended` that `Hosts.start` was given."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def tail(self) -> deque[str]:
        """Its last log lines, TAIL_LINES at most."""

    @property
    def error(self) -> str:
        """The text of its `start_failed` event, if there was one."""

    @property
    def pid(self) -> int:
        """On the machine where it runs; 0 before it has been started there."""

    @property
    def alive(self) -> bool: ...

    @property
    def ending(self) -> str:
        """How it exited, and why if it said so."""

    def terminate(self) -> None:
        """The service drains, then exits."""

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> bool:
        """Whether it exited within `timeout` seconds. Its log has been read by then."""

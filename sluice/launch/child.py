"""One running service as its supervisor sees it, on this machine or on another one."""

from collections import deque
from typing import Protocol

TAIL_LINES = 40


class Child(Protocol):
    """A process that was started once. Its end is reported through the callback `ended` of `Hosts.start`."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def tail(self) -> deque[str]:
        """The last log lines of the process, TAIL_LINES at most."""

    @property
    def error(self) -> str:
        """The text of the service's `start_failed` event. Empty if there was none."""

    @property
    def pid(self) -> int:
        """Process id on the machine where the service runs. 0 before it has been started there."""

    @property
    def alive(self) -> bool: ...

    @property
    def ending(self) -> str:
        """How the process exited, and the reason if the service reported one."""

    def terminate(self) -> None:
        """Make the service drain and exit."""

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the exit and return whether it happened. If so, the log has been read."""

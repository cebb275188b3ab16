"""The interface between a supervisor and the machines on which its services run."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from sluice.lanes.keys import Role
from sluice.launch.errors import OptionsError
from sluice.launch.logs import LogLine, Observe
from sluice.launch.plan import Service
from sluice.telemetry.service_status import StatusSource

LOCAL = "local"
RAY = "ray"
TAIL_LINES = 40

Peers = Mapping[Role, tuple[str, ...]]
"""Inbox addresses of all engines and detokenizers that are ready, by role."""


class Child(Protocol):
    """One process of a service, on this machine or on another one. A restarted service is a new child.

    Its exit is reported through the callback `ended` of `Hosts.start`.
    """

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


class Hosts(Protocol):
    """Owns what a ring needs in addition to its processes: folders, sockets and keys."""

    def open(self) -> list[Service]:
        """Prepare the machines and return all services, with addresses. Raises OptionsError, RingError, PortError."""

    @property
    def remarks(self) -> Sequence[LogLine]:
        """Lines for the log about what `open` has decided."""

    def status(self, name: str) -> StatusSource:
        """The status that the service of this name reports."""

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        """Start a service. Raises OSError.

        `observe` is called with its log lines, `ended` with its child once that has exited.
        """

    def discard(self, name: str) -> None:
        """Delete what former processes of the service have left for its next one."""

    def announce(self, peers: Peers) -> None:
        """Tell the routers the addresses of their peers. Called whenever one of them has changed."""

    def release_ports(self) -> None:
        """Leave shared ports to the services that use them. Starting a service opens its port again. Idempotent."""

    def close(self) -> None:
        """Release everything. Called after all children have exited. Idempotent."""


def place(on: str) -> tuple[str, str]:
    """Kind and address of the hosts. `on`: "local", "ray" or "ray=ADDRESS".

    Raises OptionsError for another value, or if ray is not installed.
    """
    kind, _, address = on.partition("=")
    if on != LOCAL and kind != RAY:
        raise OptionsError(f"on must be {LOCAL}, {RAY} or {RAY}=ADDRESS (got {on!r})")
    if kind == RAY and find_spec("ray") is None:
        raise OptionsError("on = ray needs the package ray: pip install 'sluice-serve[ray]'")
    return kind, address

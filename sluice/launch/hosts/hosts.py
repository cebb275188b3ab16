"""The interface between a supervisor and the machines on which its services run."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Protocol

from sluice.lanes.keys import Role
from sluice.launch.child import Child
from sluice.launch.gpus import OptionsError
from sluice.launch.hosts.local import LocalHosts
from sluice.launch.logs import Observe
from sluice.launch.plan import Plan, Service
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import StatusSource

LOCAL = "local"
RAY = "ray"

Peers = Mapping[Role, tuple[str, ...]]
"""Inbox addresses of all engines and detokenizers that are ready, by role."""


class Hosts(Protocol):
    """Owns what a ring needs in addition to its processes: folders, sockets and keys."""

    def open(self) -> list[Service]:
        """Prepare the machines and return all services, with addresses. Raises OptionsError, RingError, PortError."""

    def status(self, name: str) -> StatusSource:
        """The status that the service of this name reports."""

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        """Start a service. Raises OSError.

        `observe` is called with its log lines, `ended` with its child once that has exited.
        """

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


def open_hosts(on: str, plan: Plan, engine: EngineSettings) -> Hosts:
    """The hosts that `on` names, in the form of `place`. Raises OptionsError."""
    kind, address = place(on)
    if kind == LOCAL:
        return LocalHosts(plan, engine)
    # ray takes seconds to import.
    from sluice.launch.hosts.ray import RayHosts

    return RayHosts(plan, engine, address)

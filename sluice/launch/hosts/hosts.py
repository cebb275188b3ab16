"""What a supervisor needs of the place where its services run."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Protocol

from sluice.launch.child import Child
from sluice.launch.gpus import OptionsError
from sluice.launch.hosts.local import LocalHosts
from sluice.launch.logs import Observe
from sluice.launch.plan import Plan, Service
from sluice.ring.keys import Role
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import StatusSource

LOCAL = "local"
RAY = "ray"

Peers = Mapping[Role, tuple[str, ...]]
"""Addresses of the inboxes of all engines and detokenizers that are ready, by role."""


class Hosts(Protocol):
    """Owner of what a ring needs beside its processes: folders, sockets, keys."""

    def open(self) -> list[Service]:
        """All services, with addresses. Raises OptionsError, RingError."""

    def status(self, name: str) -> StatusSource:
        """What the service of this name reports."""

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        """Start a service. `observe` gets its log lines, `ended` its child once it has exited. Raises OSError."""

    def announce(self, peers: Peers) -> None:
        """Called whenever one of these addresses has changed."""

    def close(self) -> None:
        """All children have exited. Idempotent."""


def place(on: str) -> tuple[str, str]:
    """Kind and address. `on`: "local", "ray" or "ray=ADDRESS". Raises OptionsError, also if ray is not installed."""
    kind, _, address = on.partition("=")
    if on != LOCAL and kind != RAY:
        raise OptionsError(f"on = {on!r}: it must be {LOCAL}, {RAY} or {RAY}=ADDRESS")
    if kind == RAY and find_spec("ray") is None:
        raise OptionsError("on = ray needs the package ray: pip install 'sluice-serve[ray]'")
    return kind, address


def open_hosts(on: str, plan: Plan, engine: EngineSettings) -> Hosts:
    """As `place`. Raises OptionsError."""
    kind, address = place(on)
    if kind == LOCAL:
        return LocalHosts(plan, engine)
    # It takes seconds to import.
    from sluice.launch.hosts.ray import RayHosts

    return RayHosts(plan, engine, address)

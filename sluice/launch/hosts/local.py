"""Runs services as child processes, with their sockets in a private folder."""

import os
import socket
from collections.abc import Callable

from sluice.host.ports import LISTENER_VARIABLE, PortError, bound
from sluice.launch.folder import Folder, remove_stale
from sluice.launch.gpus import gpus_of_engines
from sluice.launch.hosts.hosts import Child, Peers
from sluice.launch.hosts.process import ChildProcess
from sluice.launch.logs import Observe
from sluice.launch.plan import Plan, Service, child_environment, services
from sluice.settings.gateway import GatewaySettings
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import STATUS_VARIABLE, StatusFileReader, StatusSource


class LocalHosts:
    """The `Hosts` of this machine. Sockets and status files are in `folder`.

    Gateways share one HTTP socket, which stays open while they restart: connections that arrive then wait for the next
    gateway that accepts.
    """

    def __init__(self, plan: Plan, engine: EngineSettings) -> None:
        self._plan = plan
        self._engine = engine
        self._environment = child_environment()
        self._folder: Folder | None = None
        self._listener: socket.socket | None = None

    @property
    def folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("the hosts have not been opened")
        return self._folder

    def open(self) -> list[Service]:
        remove_stale()
        self._folder = Folder()
        gpus = gpus_of_engines(self._plan.engines, self._engine, os.environ)
        planned = services(self._plan, self._folder.path, gpus)
        gateway = next((each for each in planned if each.kind is GatewaySettings), None)
        if gateway is not None:
            # Now, because a port in use would otherwise be noticed only by the slowly starting gateways.
            self._http_port(gateway)
        return planned

    def status(self, name: str) -> StatusSource:
        return StatusFileReader(self.folder.path / f"{name}.status")

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        environment = {
            **self._environment,
            **service.environment,
            STATUS_VARIABLE: str(self.folder.path / f"{service.name}.status"),
        }
        files = [self.folder.lock]
        if service.kind is GatewaySettings:
            files.append(self._http_port(service))
            environment[LISTENER_VARIABLE] = str(files[-1])
        return ChildProcess(service.name, service.role, service.command, environment, observe, ended, files)

    def announce(self, peers: Peers) -> None:
        """Does nothing: the sockets' names are fixed, and routers know them from the start."""

    def release_ports(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def close(self) -> None:
        self.release_ports()
        if self._folder is not None:
            self._folder.remove()

    def _http_port(self, gateway: Service) -> int:
        """The descriptor of the socket that gateways share. Raises PortError if the port cannot be opened."""
        if self._listener is None:
            settings = gateway.settings(os.environ)
            assert isinstance(settings, GatewaySettings)  # noqa: S101 - its kind is GatewaySettings
            try:
                self._listener = bound(settings.host, settings.port)
            except OSError as error:
                raise PortError(f"port {settings.port} on {settings.host} cannot be used: {error.strerror}") from error
        return self._listener.fileno()

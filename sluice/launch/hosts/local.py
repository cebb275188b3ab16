"""Runs services as child processes, with their sockets in a private folder."""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from sluice.host.ports import LISTENER_VARIABLE, PortError, bound
from sluice.launch.environment import child_environment
from sluice.launch.folder import SHARED_MEMORY, Folder, remove_stale
from sluice.launch.gpus import gpus_of_engines
from sluice.launch.hosts.hosts import Child, Peers
from sluice.launch.hosts.process import ChildProcess
from sluice.launch.keeper import check_blocks
from sluice.launch.kv_files import delete_files, why_private
from sluice.launch.logs import LAUNCHER, LogLine, Observe, launcher_line
from sluice.launch.plan import Plan, Service, services
from sluice.settings.gateway import GatewaySettings
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import STATUS_VARIABLE, StatusFileReader, StatusSource


class LocalHosts:
    """The `Hosts` of this machine. Sockets and status files are in `folder`, KV caches in another one in memory, if it
    has room.

    Gateways share one HTTP socket, which stays open while they restart: connections that arrive then wait for the next
    gateway that accepts.
    """

    def __init__(self, plan: Plan, engine: EngineSettings) -> None:
        self._plan = plan
        self._engine = engine
        self._environment = child_environment()
        self._folder: Folder | None = None
        self._kv_folder: Folder | None = None
        self._remarks: list[LogLine] = []
        self._listener: socket.socket | None = None

    @property
    def folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("the hosts have not been opened")
        return self._folder

    def open(self) -> list[Service]:
        remove_stale()
        self._folder = Folder()
        gpus = gpus_of_engines(len(self._plan.phases), self._engine, os.environ)
        planned = services(self._plan, self._folder.path, gpus, self._open_kv_folder(bool(gpus)))
        gateway = next((each for each in planned if each.kind is GatewaySettings), None)
        if gateway is not None:
            # Now, because a port in use would otherwise be noticed only by the slowly starting gateways.
            self._http_port(gateway)
        return planned

    @property
    def remarks(self) -> Sequence[LogLine]:
        return self._remarks

    def status(self, name: str) -> StatusSource:
        return StatusFileReader(self.folder.path / f"{name}.status")

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        environment = {
            **self._environment,
            **service.environment,
            STATUS_VARIABLE: str(self.folder.path / f"{service.name}.status"),
        }
        files = [folder.lock for folder in (self.folder, self._kv_folder) if folder is not None]
        if service.kind is GatewaySettings:
            files.append(self._http_port(service))
            environment[LISTENER_VARIABLE] = str(files[-1])
        return ChildProcess(service.name, service.role, service.command, environment, observe, ended, files)

    def discard(self, name: str) -> None:
        if self._kv_folder is not None:
            delete_files(self._kv_folder.path, name)

    def announce(self, peers: Peers) -> None:
        """Does nothing: the sockets' names are fixed, and routers know them from the start."""

    def release_ports(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def close(self) -> None:
        self.release_ports()
        for folder in (self._kv_folder, self._folder):
            if folder is not None:
                folder.remove()

    def _open_kv_folder(self, has_gpus: bool) -> Path | None:
        """The folder for KV caches in memory, which may be the user's. None if they are in private memory. Raises
        OptionsError if a keeper needs them, and cannot have them."""
        chosen = self._engine.kv_folder if self._engine.needs_pool_folder else None
        reason = "" if chosen else why_private(self._engine, Path(SHARED_MEMORY))
        if not (chosen or reason):
            try:
                self._kv_folder = Folder(SHARED_MEMORY)
            except OSError as error:
                reason = str(error)
        if self._plan.keeper_option:
            check_blocks(self._plan.keeper_option, self._engine, has_gpus, reason)
        if self._kv_folder is not None:
            path = self._kv_folder.path
            self._remarks.append(launcher_line(LAUNCHER, "kv_cache_in_files", "info", folder=str(path)))
            return path
        if reason:
            # Engines of one phase have to compute again what they cannot copy.
            level = "warning" if any(self._plan.phases.values()) else "info"
            self._remarks.append(launcher_line(LAUNCHER, "kv_cache_private", level, reason=reason))
        return None if chosen is None else Path(chosen)

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

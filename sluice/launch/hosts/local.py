"""Runs services as child processes, with their sockets in a private folder."""

import os
from collections.abc import Callable, Mapping

from sluice.launch.child import Child
from sluice.launch.folder import Folder, remove_stale
from sluice.launch.gpus import gpus_of_engines
from sluice.launch.hosts.process import ChildProcess
from sluice.launch.logs import Observe
from sluice.launch.plan import Plan, Service, child_environment, services
from sluice.ring.keys import Role
from sluice.settings.services import EngineSettings
from sluice.telemetry.service_status import STATUS_VARIABLE, StatusFileReader, StatusSource


class LocalHosts:
    """The `Hosts` of this machine. Sockets and status files are in `folder`."""

    def __init__(self, plan: Plan, engine: EngineSettings) -> None:
        self._plan = plan
        self._engine = engine
        self._environment = child_environment()
        self._folder: Folder | None = None

    @property
    def folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("the hosts have not been opened")
        return self._folder

    def open(self) -> list[Service]:
        remove_stale()
        self._folder = Folder()
        gpus = gpus_of_engines(self._plan.engines, self._engine, os.environ)
        return services(self._plan, self._folder.path, gpus)

    def status(self, name: str) -> StatusSource:
        return StatusFileReader(self.folder.path / f"{name}.status")

    def start(self, service: Service, observe: Observe, ended: Callable[[Child], None]) -> Child:
        environment = {
            **self._environment,
            **service.environment,
            STATUS_VARIABLE: str(self.folder.path / f"{service.name}.status"),
        }
        files = (self.folder.lock,)
        return ChildProcess(service.name, service.role, service.command, environment, observe, ended, files)

    def announce(self, peers: Mapping[Role, tuple[str, ...]]) -> None:
        """Does nothing: the sockets' names are fixed, and routers know them from the start."""

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()

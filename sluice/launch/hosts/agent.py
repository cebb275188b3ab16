"""The agent of a service on another machine: owns the service's process there and reports on request."""

import ipaddress
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sluice.host.ports import Port, PortError, check_ports
from sluice.lanes.keys import Role
from sluice.launch.environment import child_environment
from sluice.launch.folder import Folder, remove_stale
from sluice.launch.hosts.hosts import Peers
from sluice.launch.hosts.process import ChildProcess
from sluice.launch.logs import LogLine
from sluice.launch.plan import PYTHON, Service
from sluice.telemetry.service_status import STATUS_VARIABLE, StatusFileReader, Version

MAX_LINES = 10_000
"""Number of log lines kept until the supervisor has read them. The oldest are dropped first."""
KILL_SECONDS = 5.0
PORT_POLL_SECONDS = 0.2
LOOPBACK = "127.0.0.1"
HOSTS = {"port": "host", "admin_port": "admin_host", "metrics_port": "metrics_host"}
"""For each setting of a port, the setting of the host to listen on."""
LISTS: Mapping[Role, str] = {"engine": "engines", "detok": "detokenizers"}
"""For each role, the router's setting for the addresses of these peers, which is also the name of the file with them.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one run of the service."""

    pid: int
    lines: tuple[LogLine, ...]
    """Log lines of this run that the caller had not seen."""
    lines_seen: int
    """Number of lines so far, to be passed to the next call of `Agent.report`."""
    status: tuple[Version, bytes] | None
    """The latest status. None if the caller has seen this version."""
    ending: str | None
    """How the process exited. None while it runs."""


class Agent:
    """Starts and stops a service's process on this machine.

    Thread-safe, except that `start` must be called from the main thread, because children die with the thread that
    started them. `address`: IP address at which other machines reach this one. `keys`: contents of key files, by path
    in their folder.
    """

    def __init__(self, address: str, keys: Mapping[str, bytes]) -> None:
        remove_stale()
        self._ip = ipaddress.ip_address(address)
        self._folder = Folder()
        self._keys = self._write_keys(keys) if keys else None
        self._run = ""
        self._child: ChildProcess | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._count = 0
        """Number of lines of this run, including those that have been dropped."""

    def free_address(self) -> tuple[str, int]:
        """The IP address of this machine, and a port that is free now."""
        family = socket.AF_INET6 if self._ip.version == 6 else socket.AF_INET
        with socket.create_server((str(self._ip), 0), family=family) as server:
            return str(self._ip), server.getsockname()[1]

    def start(self, run: str, service: Service, peers: Peers) -> None:
        """Start the service unless `run` has been started already. Kills a former process. Raises OSError."""
        if run == self._run:
            return
        if service.rank is not None and service.rank.number == 0 and service.rank.master != str(self._ip):
            raise OSError(f"rank 0 moved to {self._ip}, but the other ranks connect to {service.rank.master}")
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_SECONDS)
        with self._lock:
            self._run, self._count, self._ended = run, 0, threading.Event()
            self._lines.clear()
        self._status(service.name).reset()
        self.announce(peers)
        local = self._localize(service)
        _await_ports(local)
        status = {STATUS_VARIABLE: str(self._status_path(service.name))}
        environment = {**child_environment(), **local.environment, **status}
        observe, ended = partial(self._on_line, run), self._ended
        self._child = ChildProcess(
            local.name, local.role, local.command, environment, observe, lambda _: ended.set(), (self._folder.lock,)
        )

    def report(self, run: str, lines_seen: int, version: Version) -> Report | None:
        """The state of `run`; None if it is not the current run. `version`: that of the status that the caller has."""
        child = self._child
        if child is None or run != self._run:
            return None
        # Read before the lines, so that a report of the end contains the last lines.
        ending = child.ending if self._ended.is_set() else None
        with self._lock:
            dropped = self._count - len(self._lines)
            lines = tuple(self._lines)[max(0, lines_seen - dropped) :]
            count = self._count
        return Report(child.pid, lines, count, self._status(child.name).read(version), ending)

    def signal(self, run: str, number: signal.Signals) -> None:
        child = self._child
        if child is not None and run == self._run:
            if number is signal.SIGKILL:
                child.kill()
            else:
                child.terminate()

    def announce(self, peers: Peers) -> None:
        """Write the lists of peer addresses, which a router reads."""
        for role, name in LISTS.items():
            file = self._folder.path / name
            new_file = file.with_suffix(".new")
            new_file.write_text("".join(f"{address}\n" for address in peers.get(role, ())), encoding="utf-8")
            new_file.replace(file)

    def close(self) -> None:
        """End the process and remove the folder."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_SECONDS)
        self._folder.remove()
        # Actors that were killed on this machine leave folders that contain keys too.
        remove_stale()

    def _localize(self, service: Service) -> Service:
        """The service with the values that only its machine knows: addresses, folders, the interpreter."""
        host = f"[{self._ip}]" if self._ip.version == 6 else str(self._ip)
        local: dict[str, object] = {"listen": f"tcp://{host}:*"}
        if self._keys is not None:
            local["keys"] = str(self._keys)
        if service.role == "router":
            local |= {name: (f"file://{self._folder.path / name}",) for name in LISTS.values()}
            if _is_wildcard(str(service.arguments["host"])):
                # So that the router reports an address at which clients can reach it.
                local["host"] = str(self._ip)
        return replace(service, arguments={**service.arguments, **local}, python=service.python or PYTHON)

    def _on_line(self, run: str, line: LogLine) -> None:
        with self._lock:
            if run == self._run:
                self._lines.append(line)
                self._count += 1

    def _status_path(self, name: str) -> Path:
        return self._folder.path / f"{name}.status"

    def _status(self, name: str) -> StatusFileReader:
        return StatusFileReader(self._status_path(name))

    def _write_keys(self, keys: Mapping[str, bytes]) -> Path:
        folder = self._folder.path / "keys"
        for name, content in keys.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(0o600)
            file.write_bytes(content)
        return folder


def _await_ports(service: Service) -> None:
    """Wait for the service's ports: the process of an actor that was killed uses them until it has drained.

    If the ports are still in use afterwards, the service reports it.
    """
    arguments = service.arguments
    ports = [
        Port(name, str(arguments.get(host) or LOOPBACK), int(arguments.get(name) or 0)) for name, host in HOSTS.items()
    ]
    deadline = time.monotonic() + float(arguments.get("drain_timeout") or 0) + KILL_SECONDS
    while time.monotonic() < deadline:
        try:
            check_ports(ports)
            return
        except PortError:
            time.sleep(PORT_POLL_SECONDS)


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "[::]", "*")  # noqa: S104

"""A service's seat on another machine: it owns the process there and reports about it when asked."""

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

from sluice.launch.folder import Folder, remove_stale
from sluice.launch.hosts.process import ChildProcess
from sluice.launch.logs import LogLine
from sluice.launch.plan import PYTHON, Service, child_environment
from sluice.ring.keys import Role
from sluice.ring.ports import Port, PortError, check_ports
from sluice.telemetry.service_status import STATUS_VARIABLE, StatusFileReader, Version

# Kept until the supervisor has read them; the oldest are lost first.
MAX_LINES = 10_000
KILL_SECONDS = 5.0
PORT_POLL_SECONDS = 0.2
LOOPBACK = "127.0.0.1"
HOSTS = {"port": "host", "admin_port": "admin_host", "metrics_port": "metrics_host"}
"""The setting of each port's interface."""
LISTS: Mapping[Role, str] = {"engine": "engines", "detok": "detokenizers"}
"""Setting of a router, and name of the file, for the addresses of each role."""


@dataclass(frozen=True, slots=True)
class Report:
    """About one run of the service."""

    pid: int
    lines: tuple[LogLine, ...]
    """After the first `seen` ones of this run."""
    seen: int
    """What to pass next time."""
    status: tuple[Version, bytes] | None
    """If it has changed since `version`."""
    ending: str | None
    """None while it runs."""


class Seat:
    """Thread-safe, except that `start` is to be called from the process's main thread: children die with their thread.

    `address`: IP of this machine, at which the others reach it. `keys`: content of key files by path in their folder.
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
        """Lines of this run, with those that are no longer kept."""

    def free_address(self) -> tuple[str, int]:
        """IP of this machine, and a port that nothing uses now."""
        family = socket.AF_INET6 if self._ip.version == 6 else socket.AF_INET
        with socket.create_server((str(self._ip), 0), family=family) as found:
            return str(self._ip), found.getsockname()[1]

    def start(self, run: str, service: Service, peers: Mapping[Role, tuple[str, ...]]) -> None:
        """Start the service, once per `run`; a former process is killed. Raises OSError."""
        if run == self._run:
            return
        if service.rank is not None and service.rank.number == 0 and service.rank.master != str(self._ip):
            raise OSError(f"rank 0 has moved to {self._ip}, but the other ranks connect to {service.rank.master}")
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_SECONDS)
        with self._lock:
            self._run, self._count, self._ended = run, 0, threading.Event()
            self._lines.clear()
        self._status(service.name).reset()
        self.announce(peers)
        here = self._at_home(service)
        _await_ports(here)
        status = {STATUS_VARIABLE: str(self._status_path(service.name))}
        environment = {**child_environment(), **here.environment, **status}
        observe, ended = partial(self._keep, run), self._ended
        self._child = ChildProcess(
            here.name, here.role, here.command, environment, observe, lambda _: ended.set(), (self._folder.lock,)
        )

    def report(self, run: str, seen: int, version: Version) -> Report | None:
        """None if this is not the run of now."""
        child = self._child
        if child is None or run != self._run:
            return None
        # First: the last lines come before the end.
        ending = child.ending if self._ended.is_set() else None
        with self._lock:
            missed = self._count - len(self._lines)
            lines = tuple(self._lines)[max(0, seen - missed) :]
            count = self._count
        return Report(child.pid, lines, count, self._status(child.name).read(version), ending)

    def signal(self, run: str, number: signal.Signals) -> None:
        child = self._child
        if child is not None and run == self._run:
            if number is signal.SIGKILL:
                child.kill()
            else:
                child.terminate()

    def announce(self, peers: Mapping[Role, tuple[str, ...]]) -> None:
        """Write the lists of addresses, which a router reads."""
        for role, name in LISTS.items():
            file = self._folder.path / name
            new = file.with_suffix(".new")
            new.write_text("".join(f"{each}\n" for each in peers.get(role, ())), encoding="utf-8")
            new.replace(file)

    def close(self) -> None:
        """End the process and remove the folder."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_SECONDS)
        self._folder.remove()
        # Those of actors that were killed here: they hold keys too.
        remove_stale()

    def _at_home(self, service: Service) -> Service:
        """The service with what only its machine knows: addresses, folders, the interpreter."""
        host = f"[{self._ip}]" if self._ip.version == 6 else str(self._ip)
        own: dict[str, object] = {"listen": f"tcp://{host}:*"}
        if self._keys is not None:
            own["keys"] = str(self._keys)
        if service.role == "router":
            own |= {name: (f"file://{self._folder.path / name}",) for name in LISTS.values()}
            if _is_wildcard(str(service.arguments["host"])):
                # So that the address that it reports is one at which clients reach it.
                own["host"] = str(self._ip)
        return replace(service, arguments={**service.arguments, **own}, python=service.python or PYTHON)

    def _keep(self, run: str, line: LogLine) -> None:
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
    """The process of an actor that was killed keeps its ports until it has drained.

    If they are in use even then, the service says so itself.
    """
    given = service.arguments
    ports = [Port(name, str(given.get(host) or LOOPBACK), int(given.get(name) or 0)) for name, host in HOSTS.items()]
    end = time.monotonic() + float(given.get("drain_timeout") or 0) + KILL_SECONDS
    while time.monotonic() < end:
        try:
            check_ports(ports)
            return
        except PortError:
            time.sleep(PORT_POLL_SECONDS)


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "[::]", "*")  # noqa: S104

"""A ring whose services each run on a separate machine."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from sluice import tiny_model
from sluice.lanes.keys import ROLES, Role
from sluice.settings.services import RING
from tests.fakes.processes import wait_until
from tests.system.hosts.mounted_keys import MountedKeys
from tests.system.hosts.network import Machine, Network, host_name

Naming = Literal["dns", "tcp"]
"""How routers find peers: by `dns://` and one name for each kind, or by `tcp://` and one name for each peer."""

RING_PORT, GRPC_PORT, TORCHRUN_PORT = 7000, 50051, 29500
START_SECONDS = 120.0
DRAIN_SECONDS = 60.0
KNOWN_SECONDS = 30.0
MODULES = {settings.role: settings.module for settings in RING.values()}
SETTINGS: Mapping[Role, Mapping[str, Any]] = {
    "router": {"port": GRPC_PORT, "insecure": True},
    "engine": {"threads": 1, "kv_cache_tokens": 32_768, "max_batch_size": 64},
    "detok": {},
}
COUNTS: Mapping[Role, int] = {"detok": 2, "engine": 2, "router": 2}


@dataclass(frozen=True)
class Service:
    """A process on its machine. `seat`: its name in the ring, which a successor inherits."""

    seat: str
    role: Role
    machine: Machine
    process: "subprocess.Popen[bytes]"
    log: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of this event."""
        lines = self.log.read_text().splitlines(keepends=True)
        read = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [line for line in read if line.get("event") == name]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def drain(self) -> None:
        """Send SIGTERM. Raises RuntimeError unless the service ends by itself with status 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.seat} still runs {DRAIN_SECONDS:g} s after SIGTERM: see {self.log}") from None
        if status != 0:
            raise RuntimeError(f"{self.seat} ended with status {status} after SIGTERM: see {self.log}")


class Ring:
    """Starts services and registers their addresses in the DNS. Not thread-safe."""

    model = tiny_model.path()
    counts = COUNTS

    def __init__(self, network: Network, folder: Path, naming: Naming = "dns") -> None:
        self.network = network
        self.keys = MountedKeys(folder / "keys")
        self.services: dict[str, Service] = {}
        """The running services, by seat."""
        self._started: list[Service] = []
        self._folder = folder
        self._naming = naming

    def __enter__(self) -> Self:
        try:
            for role, count in self.counts.items():
                for i in range(count):
                    self.launch(f"{role}-{i}")
            for service in list(self.services.values()):
                self.wait_ready(service)
            # Routers log that they are ready once they listen, before they know any peers.
            for service in [*self.of("engine"), *self.of("detok")]:
                self.wait_known(service)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._started:
            service.kill()

    @property
    def addresses(self) -> list[str]:
        """gRPC addresses of the routers."""
        return [f"{router.machine.host}:{GRPC_PORT}" for router in self.of("router")]

    @property
    def moved(self) -> int:
        """Number of requests that have ended after more than one attempt."""
        return sum(line.get("attempts", 0) > 1 for line in self._router_events("request_ended"))

    @property
    def lost(self) -> Counter[str]:
        """How often routers have lost each seat."""
        return Counter(line["peer"] for line in self._router_events("peer_lost"))

    def _router_events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of an event from all routers that were ever started."""
        routers = [service for service in self._started if service.role == "router"]
        return [line for router in routers for line in router.events(name)]

    def of(self, role: Role) -> list[Service]:
        return [service for service in self.services.values() if service.role == role]

    def launch(self, seat: str, machine: Machine | None = None) -> Service:
        """Start a service, by default on a new machine. Its name resolves from now on, before it is ready."""
        role, machine = _role(seat), machine or self.network.machine()
        command = [sys.executable, "-m", MODULES[role], *self._flags(seat, role, machine)]
        service = self.services[seat] = self._run(seat, role, machine, command)
        self.publish()
        return service

    def launch_pair(self, seat: str) -> tuple[Service, Service]:
        """Start one engine on two machines: ranks 0 and 1, each under torchrun."""
        machines = [self.network.machine() for _ in range(2)]
        flags = self._flags(seat, "engine", machines[0], tensor_parallel=2, device="cpu")
        group = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", machines[0].ip]
        group += ["--master-port", str(TORCHRUN_PORT), "--max-restarts", "1000", "-m", MODULES["engine"], *flags]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--node-rank"]
        ranks = [self._run(seat, "engine", machine, [*torchrun, str(i), *group]) for i, machine in enumerate(machines)]
        self.services[seat] = ranks[0]
        self.publish()
        return ranks[0], ranks[1]

    def wait_ready(self, service: Service) -> None:
        """Raises RuntimeError if the service ends or is not ready in time."""
        wait_until(lambda: bool(service.events("ready")) or service.process.poll() is not None, START_SECONDS)
        if not service.events("ready"):
            raise RuntimeError(f"{service.seat} is not ready: see {service.log}")

    def wait_known(self, service: Service) -> None:
        """Raises RuntimeError unless every router knows this engine or detokenizer soon after it is ready."""
        (ready,) = service.events("ready")

        def knows(router: Service) -> bool:
            joined = [line for line in router.events("peer_joined") if line["address"] == ready["address"]]
            return any(line["timestamp"] >= ready["timestamp"] for line in joined)

        if not wait_until(lambda: all(map(knows, self.of("router"))), KNOWN_SECONDS):
            raise RuntimeError(f"{service.seat} is unknown to a router {KNOWN_SECONDS:g} s after it was ready")

    def start(self, seat: str, machine: Machine | None = None) -> Service:
        """Launch a service, and wait until it is ready and all routers know it."""
        service = self.launch(seat, machine)
        self.wait_ready(service)
        if service.role != "router":
            self.wait_known(service)
        return service

    def unregister(self, seat: str) -> Service:
        """Remove a service from the DNS."""
        service = self.services.pop(seat)
        self.publish()
        return service

    def publish(self) -> None:
        """Register every service in the DNS by its role and its seat. Names without services do not exist."""
        names = {role: [service.machine.ip for service in self.of(role)] for role in ROLES}
        names |= {seat: [] for seat in {service.seat for service in self._started}}
        names |= {seat: [service.machine.ip] for seat, service in self.services.items()}
        self.network.dns.set_records(names)

    def _run(self, seat: str, role: Role, machine: Machine, command: Sequence[str]) -> Service:
        log = self._folder / f"{seat}-{secrets.token_hex(3)}.log"
        with log.open("wb") as stream:
            service = Service(seat, role, machine, machine.run(command, stream), log)
        self._started.append(service)
        return service

    def _flags(self, seat: str, role: Role, machine: Machine, **overrides: Any) -> list[str]:
        settings = {"model": self.model, "id": seat, "listen": f"tcp://{machine.host}:{RING_PORT}"}
        settings |= {"keys": self.keys.mount(role), **SETTINGS[role], **overrides}
        if role == "router":
            settings |= {"host": machine.ip, "engines": self._entries("engine"), "detokenizers": self._entries("detok")}
        flags: list[str] = []
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
        return flags

    def _entries(self, role: Role) -> str:
        if self._naming == "dns":
            return f"dns://{host_name(role)}:{RING_PORT}"
        return ",".join(f"tcp://{host_name(f'{role}-{i}')}:{RING_PORT}" for i in range(self.counts[role]))


def _role(seat: str) -> Role:
    return next(role for role in ROLES if seat.startswith(role))

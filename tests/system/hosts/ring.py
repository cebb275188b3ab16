"""A ring whose services are alone on their machines."""

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
from sluice.ring.keys import ROLES, Role
from sluice.settings.services import RING
from tests.fakes.processes import wait_until
from tests.system.hosts.mounted_keys import MountedKeys
from tests.system.hosts.network import Machine, Network, host_name

Naming = Literal["dns", "tcp"]
"""How routers know peers: by `dns://` and one name for all of a kind, or by `tcp://` and a name for each."""

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
    """One process on its machine. `seat` is its name in the ring, which its successor takes over."""

    seat: str
    role: Role
    machine: Machine
    process: "subprocess.Popen[bytes]"
    log: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of this name."""
        lines = self.log.read_text().splitlines(keepends=True)
        read = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [line for line in read if line.get("event") == name]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def drain(self) -> None:
        """SIGTERM. Raises RuntimeError unless it ends by itself, with status 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.seat} runs {DRAIN_SECONDS:g} s after SIGTERM: see {self.log}") from None
        if status != 0:
            raise RuntimeError(f"{self.seat} ended with status {status} after SIGTERM: see {self.log}")


class Ring:
    """Starts services and says in the DNS where they are. Its methods are for one thread."""

    def __init__(self, network: Network, folder: Path, naming: Naming = "dns") -> None:
        self.network = network
        self.keys = MountedKeys(folder / "keys")
        self.services: dict[str, Service] = {}
        """By seat."""
        self._started: list[Service] = []
        self._folder = folder
        self._naming = naming

    def __enter__(self) -> Self:
        try:
            for role, count in COUNTS.items():
                for i in range(count):
                    self.launch(f"{role}-{i}")
            for service in list(self.services.values()):
                self.wait_ready(service)
            # A router says that it is ready as soon as it listens; its health is what clients would wait for.
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
        """Of the routers."""
        return [f"{each.machine.host}:{GRPC_PORT}" for each in self.of("router")]

    @property
    def moved(self) -> int:
        """Requests that have ended after more than one attempt."""
        routers = [each for each in self._started if each.role == "router"]
        return sum(line.get("attempts", 0) > 1 for router in routers for line in router.events("request_ended"))

    @property
    def lost(self) -> Counter[str]:
        """How often routers lost each seat."""
        routers = [each for each in self._started if each.role == "router"]
        return Counter(line["peer"] for router in routers for line in router.events("peer_lost"))

    def of(self, role: Role) -> list[Service]:
        return [each for each in self.services.values() if each.role == role]

    def launch(self, seat: str, machine: Machine | None = None) -> Service:
        """Start a service, by default on a machine of its own. Its name resolves from now on, as with
        publishNotReadyAddresses."""
        role, machine = _role(seat), machine or self.network.machine()
        command = [sys.executable, "-m", MODULES[role], *self._flags(seat, role, machine)]
        service = self.services[seat] = self._run(seat, role, machine, command)
        self.publish()
        return service

    def launch_pair(self, seat: str) -> tuple[Service, Service]:
        """One engine that two machines compute: ranks 0 and 1, each under its torchrun."""
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
        """Raises RuntimeError if it ends, or is late."""
        wait_until(lambda: bool(service.events("ready")) or service.process.poll() is not None, START_SECONDS)
        if not service.events("ready"):
            raise RuntimeError(f"{service.seat} is not ready: see {service.log}")

    def wait_known(self, service: Service) -> None:
        """Raises RuntimeError unless every router has heard of this engine or detokenizer soon after it was ready."""
        (ready,) = service.events("ready")

        def knows(router: Service) -> bool:
            joined = [line for line in router.events("peer_joined") if line["address"] == ready["address"]]
            return any(line["timestamp"] >= ready["timestamp"] for line in joined)

        if not wait_until(lambda: all(map(knows, self.of("router"))), KNOWN_SECONDS):
            raise RuntimeError(f"{service.seat} is unknown to a router {KNOWN_SECONDS:g} s after it was ready")

    def start(self, seat: str, machine: Machine | None = None) -> Service:
        """Launch, and wait until it is ready and the routers know it."""
        service = self.launch(seat, machine)
        self.wait_ready(service)
        if service.role != "router":
            self.wait_known(service)
        return service

    def forget(self, seat: str) -> Service:
        """Take a service out of the ring's names."""
        service = self.services.pop(seat)
        self.publish()
        return service

    def publish(self) -> None:
        """Name every service, by kind and by seat; a kind or a seat without a service does not exist."""
        names = {role: [each.machine.ip for each in self.of(role)] for role in ROLES}
        names |= {seat: [] for seat in {each.seat for each in self._started}}
        names |= {seat: [each.machine.ip] for seat, each in self.services.items()}
        self.network.dns.say(names)

    def _run(self, seat: str, role: Role, machine: Machine, command: Sequence[str]) -> Service:
        log = self._folder / f"{seat}-{secrets.token_hex(3)}.log"
        with log.open("wb") as stream:
            service = Service(seat, role, machine, machine.run(command, stream), log)
        self._started.append(service)
        return service

    def _flags(self, seat: str, role: Role, machine: Machine, **others: Any) -> list[str]:
        settings = {"model": tiny_model.path(), "id": seat, "listen": f"tcp://{machine.host}:{RING_PORT}"}
        settings |= {"keys": self.keys.mount(role), **SETTINGS[role], **others}
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
        return ",".join(f"tcp://{host_name(f'{role}-{i}')}:{RING_PORT}" for i in range(COUNTS[role]))


def _role(seat: str) -> Role:
    return next(role for role in ROLES if seat.startswith(role))

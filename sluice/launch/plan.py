"""Which processes a ring is made of, and their command lines."""

import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from sluice.launch.gpus import Gpus, OptionsError
from sluice.launch.rank import Rank
from sluice.ring.cores import usable_cores
from sluice.settings.describe import settings_of
from sluice.settings.gateway import GatewaySettings
from sluice.settings.process import ProcessSettings
from sluice.settings.read import SettingsError, read_settings
from sluice.settings.services import DetokenizerSettings, EngineSettings, RouterSettings, ServiceSettings

Arguments = Mapping[str, Any]
"""Settings of a service by name, such as {"max_batch_size": 8}; None is left out."""

# -P: without it, `-m router` would run a router.py in the user's current folder.
PYTHON = (sys.executable, "-P")
GATEWAY = "gateway"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""Where this machine reaches what listens on every interface."""

MAX_PORT = 65535
REMOTE = ("SLUICE_ROUTER_", "SLUICE_ENGINE_", "SLUICE_DETOK_", "NCCL_")
"""Prefixes of the variables that services on other machines get. No credentials (HF_TOKEN): Ray displays them."""
# Not inherited: the engines of a ring that a torchrun process starts are not torchrun's ranks.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Plan:
    """A ring on one machine. Raises OptionsError."""

    model: str
    """Checkpoint folder."""
    name: str
    """Served name."""
    engines: int = 1
    detokenizers: int = 2
    routers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """Of the first router; the others have the ports after it. 0: any free ones."""
    metrics_port: int = 0
    """Metrics and health of the first router; other routers, engines, detokenizers and the gateway have the ports after
    it. 0: none."""
    http_port: int = 0
    """Of the HTTP gateway, which needs a `port` of the routers. 0: no gateway."""
    keys: str | None = None
    """Folder of the ring's keys: lanes are encrypted, although all of them stay on this machine."""
    drain_timeout: float = 10.0
    """Seconds for live streams to end, for each service that stops."""
    max_failed_starts: int = 5
    """A service that exits this often in a row before it is ready is given up."""
    freeze_timeout: float = 120.0
    """A service whose event loop stands still for this many seconds is killed and restarted."""
    shared_args: Arguments = field(default_factory=dict)
    """Settings of every service that has them; those below take precedence."""
    engine_args: Arguments = field(default_factory=dict)
    detokenizer_args: Arguments = field(default_factory=dict)
    router_args: Arguments = field(default_factory=dict)
    """admin_port is that of the first router; the others have the ports after it."""
    gateway_args: Arguments = field(default_factory=dict)
    python: Sequence[str] = PYTHON

    def __post_init__(self) -> None:
        if self.http_port and not self.port:
            raise OptionsError("http_port needs a fixed port of the routers, but port is 0 (any free port)")
        for count in ("engines", "detokenizers", "routers", "max_failed_starts"):
            if getattr(self, count) < 1:
                raise OptionsError(f"{count} must be at least 1, not {getattr(self, count)}")
        ranges = {
            "port": _ports(self.port, self.routers),
            "metrics_port": _ports(self.metrics_port, self.processes),
            "http_port": _ports(self.http_port, 1),
            "admin_port": _ports(self.router_args.get("admin_port") or 0, self.routers),
        }
        for (one, these), (other, those) in combinations(ranges.items(), 2):
            if both := set(these) & set(those):
                raise OptionsError(f"{one} and {other}: port {min(both)} is in both ranges")
        for given in ("shared_args", "engine_args", "detokenizer_args", "router_args", "gateway_args"):
            for name, value in getattr(self, given).items():
                if callable(value):
                    raise OptionsError(
                        f'{given}: {name} must be a name, such as "module:function", which the service looks up by '
                        f"itself; it is {value!r}"
                    )

    @property
    def processes(self) -> int:
        return self.routers + self.engines + self.detokenizers + bool(self.http_port)


@dataclass(frozen=True, slots=True)
class Service:
    """One process of a plan."""

    name: str
    kind: type[ProcessSettings]
    arguments: Arguments
    python: Sequence[str] = PYTHON
    gpus: Gpus | None = None
    """Of an engine; None: all that it finds."""
    rank: Rank | None = None
    """None: an engine starts its other ranks itself."""

    @property
    def role(self) -> str:
        return self.kind.role

    @property
    def command(self) -> list[str]:
        return [*self.python, "-m", self.kind.module, *_flags(self.arguments)]

    @property
    def environment(self) -> Mapping[str, str]:
        """In addition to `child_environment`."""
        gpus = {} if self.gpus is None else self.gpus.environment
        return gpus if self.rank is None else {**gpus, **self.rank.environment}

    @property
    def drain_timeout(self) -> float:
        return float(self.arguments["drain_timeout"])

    def on_port(self, port: int) -> "Service":
        return replace(self, arguments={**self.arguments, "port": port})

    def settings(self, environment: Mapping[str, str]) -> ProcessSettings:
        """What it will read in this environment. Raises OptionsError if it would refuse to start."""
        try:
            return read_settings(self.kind, _flags(self.arguments), environment)
        except SettingsError as error:
            raise OptionsError(f"{self.kind.module}: {error}") from error


def services(plan: Plan, folder: Path, gpus: Sequence[Gpus] = ()) -> list[Service]:
    """All processes; their sockets are in `folder`. `gpus`: by engine, if known."""
    routers = ["router"] if plan.routers == 1 else [f"router-{i}" for i in range(plan.routers)]
    engines = [f"engine-{i}" for i in range(plan.engines)]
    detokenizers = [f"detok-{i}" for i in range(plan.detokenizers)]
    peers = {"engines": _sockets(folder, engines), "detokenizers": _sockets(folder, detokenizers)}
    names = [*routers, *engines, *detokenizers, *([GATEWAY] if plan.http_port else [])]
    metrics_ports = dict(zip(names, _ports(plan.metrics_port, len(names)), strict=False))
    ports = _ports(plan.port, plan.routers) or [0] * plan.routers
    of_engines: Sequence[Gpus | None] = gpus or [None] * plan.engines

    def service(kind: type[ServiceSettings], name: str, own: Arguments, given: Arguments) -> Service:
        common = {
            "model": plan.model,
            "name": plan.name,
            "id": name,
            "listen": _sockets(folder, [name])[0],
            "keys": plan.keys,
            "drain_timeout": plan.drain_timeout,
            "metrics_port": metrics_ports.get(name),
        }
        return Service(name, kind, {**common, **own, **_shared(plan, kind), **given}, plan.python)

    of_routers = {**peers, "host": plan.host}
    return [
        *(
            replace(service(EngineSettings, name, _share(plan, on), plan.engine_args), gpus=on)
            for name, on in zip(engines, of_engines, strict=True)
        ),
        *(service(DetokenizerSettings, name, {}, plan.detokenizer_args) for name in detokenizers),
        *(
            service(RouterSettings, name, {**of_routers, "port": ports[i]}, _router_args(plan, i))
            for i, name in enumerate(routers)
        ),
        *([_gateway(plan, ports, metrics_ports.get(GATEWAY))] if plan.http_port else []),
    ]


def _gateway(plan: Plan, ports: Sequence[int], metrics_port: int | None) -> Service:
    """On the routers' interface, with their certificate."""
    here = LOOPBACK.get(plan.host, plan.host)
    host = f"[{here}]" if ":" in here else here
    as_routers = {name: plan.router_args.get(name) for name in ("insecure", "tls_certificate", "tls_key")}
    own = {
        "id": GATEWAY,
        "routers": tuple(f"{host}:{port}" for port in ports),
        "host": plan.host,
        "port": plan.http_port,
        "metrics_port": metrics_port,
        "drain_timeout": plan.drain_timeout,
    }
    arguments = {**own, **as_routers, **_shared(plan, GatewaySettings), **plan.gateway_args}
    if plan.router_args.get("tls_certificate") and not arguments.get("router_ca"):
        raise OptionsError("http_port: with tls_certificate, the gateway needs gateway.router_ca to trust the routers")
    return Service(GATEWAY, GatewaySettings, arguments, plan.python)


def _shared(plan: Plan, kind: type[ProcessSettings]) -> Arguments:
    return {setting: value for setting, value in plan.shared_args.items() if setting in settings_of(kind)}


def _share(plan: Plan, gpus: Gpus | None) -> dict[str, Any]:
    """An engine's share of the machine."""
    return {
        "default_threads": max(1, usable_cores() // plan.engines),
        "engines_here": plan.engines,
        # If the GPUs are not assigned here, assume that all engines share one.
        "engines_per_gpu": plan.engines if gpus is None else gpus.engines,
    }


def _router_args(plan: Plan, number: int) -> Arguments:
    admin_port = plan.router_args.get("admin_port")
    return {**plan.router_args, "admin_port": admin_port + number} if admin_port else plan.router_args


def child_environment() -> dict[str, str]:
    # Engine threads that spin at barriers take the cores from the router, and from the very thread they wait for:
    # on two busy cores the tiny model's step took 100 ms instead of 8.
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **inherited}
    root = Path(__file__).parents[2]
    if root != Path(sysconfig.get_path("purelib")):
        # A checkout that may not be installed: children run in the user's folder and would not find it.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    return environment


def remote_environment() -> dict[str, str]:
    """The part of `child_environment` that services on other machines need: settings, NCCL's, and a checkout's path."""
    found = child_environment().items()
    return {name: value for name, value in found if name == "PYTHONPATH" or name.startswith(REMOTE)}


def _ports(first: int, count: int) -> list[int]:
    if first + count > MAX_PORT + 1:
        raise OptionsError(f"ports {first} to {first + count - 1} are needed, but the highest port is {MAX_PORT}")
    return list(range(first, first + count)) if first else []


def _sockets(folder: Path, names: list[str]) -> tuple[str, ...]:
    return tuple(f"ipc://{folder}/{name}" for name in names)


def _flags(arguments: Arguments) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                continue
            case bool():
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                flags += [f"--{flag}", json.dumps(value)]
            case tuple() | list():
                flags += [f"--{flag}", ",".join(map(str, value))]
            case _:
                flags += [f"--{flag}", str(value)]
    return flags

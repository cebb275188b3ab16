"""The processes of a ring and their command lines."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from sluice.host.cores import usable_cores
from sluice.lanes.keys import ROLES
from sluice.launch.errors import OptionsError
from sluice.launch.gpus import Gpus, Rank
from sluice.launch.keeper import KEEPER, asks_for_keeper, check_keeper_options
from sluice.launch.phases import Phases, check_phases, phases_of
from sluice.settings.describe import settings_of
from sluice.settings.gateway import GatewaySettings
from sluice.settings.keeper import KeeperSettings
from sluice.settings.process import ProcessSettings
from sluice.settings.read import SettingsError, read_settings
from sluice.settings.services import DetokenizerSettings, EngineSettings, RouterSettings, ServiceSettings

Arguments = Mapping[str, Any]
"""Settings of a service by name, such as {"max_batch_size": 8}. A value of None leaves the setting at its default."""

PYTHON = (sys.executable, "-P")
"""Without -P, `-m router` would run a router.py in the user's current folder."""
GATEWAY = "gateway"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The address at which this machine reaches a server that listens on every interface."""

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a ring. Raises OptionsError if they are invalid."""

    model: str
    """Checkpoint folder, or with services on other machines a Hugging Face id."""
    name: str
    """Name under which the model is served."""
    engines: int | None = None
    """Number of engines that compute both phases of requests. None: 1, or 0 if there are engines of a phase."""
    prefill_engines: int = 0
    """Number of engines that compute prompts and first tokens."""
    decode_engines: int = 0
    """Number of engines that compute all tokens after the first."""
    detokenizers: int = 2
    routers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the first router. The other routers use the following ports. 0: any free ports."""
    metrics_port: int = 0
    """Port of the first router for metrics and health. The other routers, then engines, detokenizers, gateways and the
    keeper use the following ports. 0: none."""
    http_port: int = 0
    """Port that all HTTP gateways share, which requires `port` to be set. 0: no gateway."""
    gateways: int = 1
    """Number of HTTP gateways, if there is an `http_port`."""
    kv_keeper: str | None = None
    """Address at which a keeper hands the engines' KV blocks to engines of other machines."""
    kv_disk: str | Path | None = None
    """Folder to which a keeper copies long prefixes. Without `kv_keeper` only the engines of the ring reach it."""
    keys: str | None = None
    """Folder of the ring's keys. With it, lanes are encrypted even though all of them are on this machine."""
    drain_timeout: float = 10.0
    """Seconds that requests in progress have to finish when a service stops."""
    max_failed_starts: int = 5
    """Number of consecutive exits before being ready after which a service is no longer restarted."""
    freeze_timeout: float = 120.0
    """Seconds without an iteration of its event loop after which a service is killed and restarted."""
    shared_args: Arguments = field(default_factory=dict)
    """Settings of every service that has them. The settings of a service take precedence over them."""
    engine_args: Arguments = field(default_factory=dict)
    detokenizer_args: Arguments = field(default_factory=dict)
    router_args: Arguments = field(default_factory=dict)
    """`admin_port` is the port of the first router. The other routers use the following ports."""
    gateway_args: Arguments = field(default_factory=dict)
    keeper_args: Arguments = field(default_factory=dict)
    python: Sequence[str] = PYTHON

    def __post_init__(self) -> None:
        if self.http_port and not self.port:
            raise OptionsError("http_port needs a fixed port of the routers, but port is 0 (any free port)")
        if self.gateways > 1 and not self.http_port:
            raise OptionsError(f"gateways: {self.gateways} gateways need an http_port")
        check_phases(self.engines, self.prefill_engines, self.decode_engines, self.engine_args)
        engine_args = {**self.shared_args, **self.engine_args}
        check_keeper_options(self.kv_keeper, self.kv_disk, engine_args, self.keeper_args)
        for count in ("detokenizers", "routers", "gateways", "max_failed_starts"):
            if getattr(self, count) < 1:
                raise OptionsError(f"{count} must be at least 1 (got {getattr(self, count)})")
        ranges = {
            "port": _ports(self.port, self.routers),
            "metrics_port": _ports(self.metrics_port, self.processes),
            "http_port": _ports(self.http_port, 1),
            "admin_port": _ports(self.router_args.get("admin_port") or 0, self.routers),
        }
        for (first, first_ports), (second, second_ports) in combinations(ranges.items(), 2):
            if both := set(first_ports) & set(second_ports):
                raise OptionsError(f"{first} and {second}: port {min(both)} is in both ranges")
        for arguments in (
            "shared_args", "engine_args", "detokenizer_args", "router_args", "gateway_args", "keeper_args",
        ):  # fmt: skip
            for name, value in getattr(self, arguments).items():
                if callable(value):
                    raise OptionsError(
                        f'{arguments}: {name} must be a name, such as "module:function", that the service can import '
                        f"(got {value!r})"
                    )

    @property
    def phases(self) -> Phases:
        """The engines' names and phases."""
        return phases_of(self.engines, self.prefill_engines, self.decode_engines)

    @property
    def keeper_option(self) -> str:
        """The name of the option that asks for a keeper. Empty: there is none."""
        return asks_for_keeper(self.kv_keeper, self.kv_disk)

    @property
    def counts(self) -> dict[str, int]:
        """The number of services of each kind of which there are any, such as {"routers": 1}."""
        counts = {
            "routers": self.routers,
            "engines": sum(phase is None for phase in self.phases.values()),
            "prefill_engines": self.prefill_engines,
            "decode_engines": self.decode_engines,
            "detokenizers": self.detokenizers,
            "gateways": self.gateways if self.http_port else 0,
            "keepers": 1 if self.keeper_option else 0,
        }
        return {kind: count for kind, count in counts.items() if count}

    @property
    def processes(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a ring."""

    name: str
    kind: type[ProcessSettings]
    arguments: Arguments
    python: Sequence[str] = PYTHON
    gpus: Gpus | None = None
    """The GPUs of an engine. None: all GPUs that it finds."""
    rank: Rank | None = None
    """The rank of an engine of which the launcher starts every rank. None: an engine starts its other ranks itself."""

    @property
    def role(self) -> str:
        return self.kind.role

    @property
    def on_ring(self) -> bool:
        """Whether routers and this service know each other. Otherwise it serves as soon as it is ready."""
        return self.role in ROLES

    @property
    def command(self) -> list[str]:
        return [*self.python, "-m", self.kind.module, *_flags(self.arguments)]

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables in addition to those of `child_environment`."""
        gpus = {} if self.gpus is None else self.gpus.environment
        return gpus if self.rank is None else {**gpus, **self.rank.environment}

    @property
    def drain_timeout(self) -> float:
        return float(self.arguments["drain_timeout"])

    def on_port(self, port: int) -> "Service":
        return replace(self, arguments={**self.arguments, "port": port})

    def settings(self, environment: Mapping[str, str]) -> ProcessSettings:
        """The settings that the service will read in this environment. Raises OptionsError if they are invalid."""
        try:
            return read_settings(self.kind, _flags(self.arguments), environment)
        except SettingsError as error:
            raise OptionsError(f"{self.kind.module}: {error}") from error


def services(plan: Plan, folder: Path, gpus: Sequence[Gpus] = (), kv_folder: Path | None = None) -> list[Service]:
    """The services of a ring, with their sockets in `folder`. `gpus`: those of each engine; empty if unknown.
    `kv_folder`: folder for the files of the engines' KV caches. None: the caches are in private memory, or the
    folder is not known yet."""
    routers = _numbered("router", plan.routers)
    gateways = _numbered(GATEWAY, plan.gateways) if plan.http_port else []
    keepers = [KEEPER] if plan.keeper_option else []
    engines = list(plan.phases)
    detokenizers = [f"detok-{i}" for i in range(plan.detokenizers)]
    peers = {"engines": _sockets(folder, engines), "detokenizers": _sockets(folder, detokenizers)}
    names = [*routers, *engines, *detokenizers, *gateways, *keepers]
    metrics_ports = dict(zip(names, _ports(plan.metrics_port, len(names)), strict=False))
    ports = _ports(plan.port, plan.routers) or [0] * plan.routers
    gpus_by_engine: Sequence[Gpus | None] = gpus or [None] * len(engines)

    def service(kind: type[ServiceSettings], name: str, derived: Arguments, from_user: Arguments) -> Service:
        common = {
            "model": plan.model,
            "name": plan.name,
            "id": name,
            "listen": _sockets(folder, [name])[0],
            "keys": plan.keys,
            "drain_timeout": plan.drain_timeout,
            "metrics_port": metrics_ports.get(name),
        }
        return Service(name, kind, {**common, **derived, **_shared(plan, kind), **from_user}, plan.python)

    shared = {"default_kv_folder": kv_folder, "kv_keeper": _keeper_address(plan, folder) if kv_folder else None}
    return [
        *(_keeper(plan, folder, kv_folder, metrics_ports.get(name)) for name in keepers),
        *(
            replace(service(EngineSettings, name, shared | _engine(plan, name, own), plan.engine_args), gpus=own)
            for name, own in zip(engines, gpus_by_engine, strict=True)
        ),
        *(service(DetokenizerSettings, name, {}, plan.detokenizer_args) for name in detokenizers),
        *(
            service(RouterSettings, name, {**peers, "host": plan.host, "port": ports[i]}, _router_args(plan, i))
            for i, name in enumerate(routers)
        ),
        *(_gateway(plan, name, ports, metrics_ports.get(name)) for name in gateways),
    ]


def _gateway(plan: Plan, name: str, ports: Sequence[int], metrics_port: int | None) -> Service:
    """A gateway, which listens at the routers' address and uses their certificate."""
    tls = {name: plan.router_args.get(name) for name in ("insecure", "tls_certificate", "tls_key")}
    derived = {
        "id": name,
        "routers": tuple(reached_at(plan.host, port) for port in ports),
        "host": plan.host,
        "port": plan.http_port,
        "metrics_port": metrics_port,
        "drain_timeout": plan.drain_timeout,
    }
    arguments = {**derived, **tls, **_shared(plan, GatewaySettings), **plan.gateway_args}
    if plan.router_args.get("tls_certificate") and not arguments.get("router_ca"):
        raise OptionsError(
            "http_port: with tls_certificate, the gateway must know which authority issues the routers' certificates: "
            "add --set gateway.router_ca=FILE"
        )
    return Service(name, GatewaySettings, arguments, plan.python)


def _shared(plan: Plan, kind: type[ProcessSettings]) -> Arguments:
    return {setting: value for setting, value in plan.shared_args.items() if setting in settings_of(kind)}


def _keeper_address(plan: Plan, folder: Path) -> str | None:
    """Where engines reach the ring's keeper. None without one."""
    return (plan.kv_keeper or _sockets(folder, [KEEPER])[0]) if plan.keeper_option else None


def _keeper(plan: Plan, folder: Path, kv_folder: Path | None, metrics_port: int | None) -> Service:
    """The keeper, which uses the ring's keys: those of an engine."""
    derived = {
        "id": KEEPER,
        "listen": _keeper_address(plan, folder),
        # While it is not known, the settings can be checked with another one. A ring without it has no keeper.
        "kv_folder": kv_folder or folder,
        "disk_folder": plan.kv_disk,
        "keys": plan.keys,
        "metrics_port": metrics_port,
        "drain_timeout": plan.drain_timeout,
    }
    arguments = {**derived, **_shared(plan, KeeperSettings), **plan.keeper_args}
    return Service(KEEPER, KeeperSettings, arguments, plan.python)


def _engine(plan: Plan, name: str, gpus: Gpus | None) -> dict[str, Any]:
    """Settings that tell an engine its phase, and its share of the machine."""
    engines = len(plan.phases)
    return {
        "default_threads": max(1, usable_cores() // engines),
        "engines_here": engines,
        # If the launcher does not assign GPUs, assume that all engines share one.
        "engines_per_gpu": engines if gpus is None else gpus.engines,
        "phase": plan.phases[name],
    }


def _router_args(plan: Plan, number: int) -> Arguments:
    admin_port = plan.router_args.get("admin_port")
    return {**plan.router_args, "admin_port": admin_port + number} if admin_port else plan.router_args


def reached_at(host: str, port: int) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    reachable = LOOPBACK.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


def _ports(first: int, count: int) -> list[int]:
    if first + count > MAX_PORT + 1:
        raise OptionsError(f"ports {first} to {first + count - 1} are needed, but the highest port is {MAX_PORT}")
    return list(range(first, first + count)) if first else []


def _numbered(role: str, count: int) -> list[str]:
    return [role] if count == 1 else [f"{role}-{i}" for i in range(count)]


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

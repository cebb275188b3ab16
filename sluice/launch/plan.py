"""Which processes a ring is made of, and their command lines."""

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.launch.child import Role

Arguments = Mapping[str, Any]
"""Settings of a service by field name, such as {"max_batch_size": 8}; None is left out."""

PYTHON = (sys.executable, "-P")
"""Runs a module; -P keeps a router.py in the user's folder from being taken for ours."""

KV_MEMORY_FRACTION = 0.5
"""Part of the machine's free memory that goes to the KV caches of all its engines, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A ring on one machine."""

    model: str
    """Checkpoint folder."""
    name: str
    """Served name."""
    engines: int = 1
    detokenizers: int = 2
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    metrics_port: int = 0
    """Where Prometheus asks the router; engines and then detokenizers have the ports after it. 0: nowhere."""
    drain_timeout: float = 10.0
    """Seconds for live streams to end."""
    engine_args: Arguments = field(default_factory=dict)
    detokenizer_args: Arguments = field(default_factory=dict)
    router_args: Arguments = field(default_factory=dict)
    python: Sequence[str] = PYTHON

    def __post_init__(self) -> None:
        for count in ("engines", "detokenizers"):
            if getattr(self, count) < 1:
                raise ValueError(f"{count} must be at least 1, not {getattr(self, count)}")


@dataclass(frozen=True, slots=True)
class Service:
    """One process of a plan."""

    name: str
    role: Role
    command: list[str]


def services(plan: Plan, folder: Path) -> list[Service]:
    """All processes; their sockets lie in `folder`."""
    engines = [f"engine-{i}" for i in range(plan.engines)]
    detokenizers = [f"detok-{i}" for i in range(plan.detokenizers)]
    peers = {"engines": _sockets(folder, engines), "detokenizers": _sockets(folder, detokenizers)}
    listen = {"host": plan.host, "port": plan.port}
    ports = {
        name: plan.metrics_port + i if plan.metrics_port else None
        for i, name in enumerate(["router", *engines, *detokenizers])
    }
    share: dict[str, Any] = {"threads": max(1, usable_cores() // plan.engines)}
    if plan.engine_args.get("kv_cache_tokens") is None:
        share["kv_memory_fraction"] = KV_MEMORY_FRACTION / plan.engines

    def service(name: str, role: Role, module: str, own: Arguments, given: Arguments) -> Service:
        common = {
            "model": plan.model,
            "name": plan.name,
            "id": name,
            "listen": _sockets(folder, [name])[0],
            "drain_timeout": plan.drain_timeout,
            "metrics_port": ports[name],
        }
        return Service(name, role, [*plan.python, "-m", module, *_flags({**common, **own, **given})])

    return [
        *(service(name, "engine", "engine_worker", share, plan.engine_args) for name in engines),
        *(service(name, "detok", "detok_service", {}, plan.detokenizer_args) for name in detokenizers),
        service("router", "router", "router", {**peers, **listen}, plan.router_args),
    ]


def child_environment() -> dict[str, str]:
    """Ours, and what children on one machine need beside it."""
    # Engine threads that spin at barriers take the cores from the router, and from the very thread they wait for:
    # on two busy cores the tiny model's step took 100 ms instead of 8.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    root = Path(__file__).parents[2]
    if root != Path(sysconfig.get_path("purelib")):
        # A checkout that may not be installed.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    return environment


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
            case tuple() | list():
                flags += [f"--{flag}", ",".join(map(str, value))]
            case _:
                flags += [f"--{flag}", str(value)]
    return flags

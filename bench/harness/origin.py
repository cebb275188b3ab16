"""Where and when figures were measured."""

import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from sluice.ring.cores import usable_cores


class Origin(msgspec.Struct, frozen=True):
    date: str
    command: str
    machine: str
    software: str
    threads: int
    """Of the engine, and of each peer."""


def origin(arguments: list[str], threads: int, module: str = "bench") -> Origin:
    packages = packages_text(versions(("torch", "transformers", "grpcio", "pyzmq")))
    machine = f"{usable_cores()} cores of {_processor()}, {_memory()}"
    software = f"{platform.system()}, Python {platform.python_version()}, {packages}"
    return Origin(now(), command(module, arguments), machine, software, threads)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def command(module: str, arguments: list[str]) -> str:
    return shlex.join(["python", "-m", module, *arguments])


def versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def packages_text(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {installed}" for name, installed in found.items())


def _processor() -> str:
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _memory() -> str:
    total = _field(Path("/proc/meminfo"), "MemTotal")
    return f"{int(total.split()[0]) / 2**20:.0f} GiB of memory" if total else "memory unknown"


def _field(file: Path, name: str) -> str | None:
    if sys.platform != "linux":
        return None
    lines = file.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)

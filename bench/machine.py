"""Where and when figures were measured."""

import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from sluice.ring.cores import usable_cores

PACKAGES = ("torch", "transformers", "grpcio", "pyzmq")


class Origin(msgspec.Struct, frozen=True):
    """Of a set of figures."""

    date: str
    command: str
    machine: str
    software: str
    threads: int
    """Of the engine, and of each peer."""


def origin(arguments: list[str], threads: int, module: str = "bench") -> Origin:
    """Here and now."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return Origin(
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        shlex.join(["python", "-m", module, *arguments]),
        f"{usable_cores()} cores of {_processor()}, {_memory()}",
        f"{platform.system()}, Python {platform.python_version()}, {packages}",
        threads,
    )


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

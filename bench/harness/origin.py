"""Date, command, machine and software of a measurement."""

import os
import platform
import shlex
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from sluice.host.cores import usable_cores


class Origin(msgspec.Struct, frozen=True):
    date: str
    command: str
    machine: str
    software: str
    threads: int
    """Threads of the engine, and of each peer."""


def origin(arguments: list[str], threads: int, module: str = "bench") -> Origin:
    packages = packages_text(versions(("torch", "transformers", "grpcio", "pyzmq")))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = f"{usable_cores()} cores of {_processor()}, {memory / 2**30:.0f} GiB of memory"
    software = f"{platform.system()}, Python {platform.python_version()}, {packages}"
    return Origin(now(), command(module, arguments), machine, software, threads)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def command(module: str, arguments: list[str]) -> str:
    return shlex.join(["python", "-m", module, *arguments])


def versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def packages_text(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {installed}" for name, installed in found.items())


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

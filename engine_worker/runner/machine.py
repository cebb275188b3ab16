"""Memory that this process may use; inside a container what cgroup v2 leaves it."""

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that can be had now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit, used = _read("memory.max"), _read("memory.current")
    if limit in ("", "max") or not used:
        return _available()
    return min(_available(), max(0, int(limit) - int(used)))


def gpu_memory(device: torch.device) -> int:
    """Bytes that a GPU has in all."""
    return int(torch.cuda.mem_get_info(device)[1])


def held_memory(device: torch.device) -> int:
    """Bytes of a GPU that torch holds in this process; the driver's own are not in it."""
    return int(torch.cuda.memory_reserved(device))


def _read(name: str) -> str:
    file = CGROUP / name
    return file.read_text().strip() if file.is_file() else ""


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

"""What this process may use of the machine; inside a container what cgroup v2 leaves it."""

import math
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


def usable_cores() -> int:
    """CPU cores, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("cpu.max").partition(" ")
    if quota in ("", "max"):
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


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

"""What this machine offers: free memory, and a compiler for Triton."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
COMPILERS = ("gcc", "clang")


def free_memory(device: torch.device) -> int:
    """Bytes; on a CPU inside a container what its limit (cgroup v2) leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit, used = _read("memory.max"), _read("memory.current")
    if limit in ("", "max") or not used:
        return _available()
    return min(_available(), max(0, int(limit) - int(used)))


def gpu_memory(device: torch.device) -> int:
    """Bytes of a GPU in total."""
    return int(torch.cuda.mem_get_info(device)[1])


def reserved_memory(device: torch.device) -> int:
    """Bytes of a GPU that torch has reserved in this process, without the driver's own."""
    return int(torch.cuda.memory_reserved(device))


def missing_compiler() -> str | None:
    """What Triton needs to compile but does not find, with the remedy, in one line; None: it has everything.

    Triton builds a small C extension before its first kernel.
    """
    absent = []
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        absent.append(f"a C compiler ({', '.join(COMPILERS)} or the variable CC)")
    if not (_headers() / "Python.h").is_file():
        absent.append(f"Python's headers ({_headers()}/Python.h)")
    if not absent:
        return None
    return (
        f"Triton needs {' and '.join(absent)}: "
        "install gcc and python3-dev, or Sluice's kernels run only from a filled Triton cache"
    )


def _headers() -> Path:
    # Where Triton looks: Debian's own scheme for `pip install`, posix_local, has no headers.
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _read(name: str) -> str:
    file = CGROUP / name
    return file.read_text().strip() if file.is_file() else ""


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    # Not Linux: half of the physical memory is a guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

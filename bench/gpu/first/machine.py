"""What this machine has, and what is missing, before anything runs on it."""

import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from bench.gpu import standins
from engine_worker.runner.machine import missing_compiler

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "numpy", "safetensors")
OPTIONAL = ("msgspec", "structlog", "matplotlib", "vllm", "sglang", "nanovllm")
"""Names of modules; without the first two stand-ins are used, and ranks are not compared."""


def facts(device: torch.device) -> dict[str, str]:
    """Name and value, most important first."""
    there = {name: found for name in PACKAGES if (found := _version(name))}
    absent = [name for name in OPTIONAL if name in standins.installed() or find_spec(name) is None]
    return {
        "device": _device(device),
        "compiler": missing_compiler() or "Triton can compile",
        "packages": ", ".join(f"{name} {found}" for name, found in there.items()),
        "not installed": ", ".join([name for name in PACKAGES if name not in there] + absent) or "nothing",
        "CUDA of torch": str(torch.version.cuda),
        "Python": f"{platform.python_version()}, {sys.platform}, {platform.machine()}",
        "free disk": f"{shutil.disk_usage('.').free >> 30} GiB",
    }


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a CPU, {torch.get_num_threads()} threads: figures of it say nothing about a GPU"
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors, "
        f"{free >> 30} of {total >> 30} GiB free; {torch.cuda.device_count()} of them"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

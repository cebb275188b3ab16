"""The machine: its properties, installed packages, and missing ones."""

import platform
import shutil
import sys
from importlib.util import find_spec

import torch

from bench.gpu import standins
from bench.harness.origin import command, now, packages_text, versions
from engine_worker.runner.fusing import missing_compiler

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "numpy", "safetensors")
OPTIONAL = ("msgspec", "structlog", "matplotlib", "vllm", "sglang", "nanovllm")
"""Module names; without the first two, stand-ins are used and ranks are not compared."""
SIDE_BY_SIDE = ("torch", "triton", "transformers", "flash-attn", "vllm", "sglang", "nano-vllm")


def origin(arguments: list[str], device: torch.device) -> dict[str, str]:
    found = {
        "date": now(),
        "command": command("bench.gpu", arguments),
        "device": _device(device),
        "software": f"Python {platform.python_version()}, {packages_text(versions(SIDE_BY_SIDE))}",
    }
    stood_in = ", ".join(standins.installed())
    return found | ({"stood in for": stood_in} if stood_in else {})


def facts(device: torch.device) -> dict[str, str]:
    present = versions(PACKAGES)
    absent = [name for name in OPTIONAL if name in standins.installed() or find_spec(name) is None]
    return {
        "device": _state(device),
        "compiler": missing_compiler() or "Triton can compile",
        "packages": packages_text(present),
        "not installed": ", ".join([name for name in PACKAGES if name not in present] + absent) or "nothing",
        "CUDA of torch": str(torch.version.cuda),
        "Python": f"{platform.python_version()}, {sys.platform}, {platform.machine()}",
        "free disk": f"{shutil.disk_usage('.').free >> 30} GiB",
    }


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"


def _state(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{_device(device)}: its figures say nothing about a GPU"
    found, free = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)[0]
    parts = f"compute capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    return f"{_device(device)}, {free >> 30} free, {parts}; {torch.cuda.device_count()} of them"

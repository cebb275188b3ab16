"""Where and when figures were measured."""

import platform
import shlex
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu import standins

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "vllm", "sglang", "nano-vllm")


def origin(arguments: list[str], device: torch.device) -> dict[str, str]:
    """Here and now."""
    packages = [f"{name} {found}" for name in PACKAGES if (found := _version(name))]
    stood_in = ", ".join(standins.installed())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "bench.gpu", *arguments]),
        "device": _device(device),
        "software": ", ".join([f"Python {platform.python_version()}", *packages]),
    } | ({"stood in for": stood_in} if stood_in else {})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

"""Methods that run by name on a rank, between two steps: those below, and those of the entry points GROUP.

A method is called as `method(rank, *args, **kwargs)` and returns a value that JSON can hold.
"""

import inspect
import os
import platform
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_worker.runner.memory import free_memory
from sluice.ring.calls import MAX_JSON_BYTES, MethodCall, RankAnswer, failed, parse_json, to_json
from sluice.telemetry.version import build_version

GROUP = "sluice.engine_methods"
PACKAGES = ("torch", "transformers", "flash-attn", "triton", "openvino")
STATM = Path("/proc/self/statm")

Method = Callable[..., object]


class Blocks(Protocol):
    """A KV cache, as far as all of them are alike."""

    num_blocks: int
    num_host_blocks: int
    tokens_per_block: int

    @property
    def nbytes(self) -> int:
        """Of the blocks on the device."""


@dataclass(frozen=True)
class Rank:
    """What a method may use: its first argument."""

    rank: int
    num_ranks: int
    device: torch.device
    model: Any
    """By torch a `Model`, this rank's shard; by OpenVINO its compiled model."""
    cache: Blocks
    """By torch a `KVCache`."""


class Methods:
    """For one thread."""

    def __init__(self, rank: Rank, plugins: Iterable[EntryPoint] | None = None) -> None:
        """`plugins`: instead of the installed entry points. A built-in method cannot be replaced."""
        self._rank = rank
        found = entry_points(group=GROUP) if plugins is None else plugins
        self._plugins = {plugin.name: plugin for plugin in found}

    @torch.inference_mode()
    def answer(self, call: MethodCall) -> RankAnswer:
        """Run a method; whatever it raises is the answer."""
        number = self._rank.rank
        try:
            value = to_json(self._run(call))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the engine goes on, whatever a method does
            return failed(number, f"{type(error).__name__}: {error}")
        if len(value) > MAX_JSON_BYTES:
            return failed(number, f"ValueError: its value has {len(value)} bytes, at most {MAX_JSON_BYTES} are allowed")
        return RankAnswer(number, value)

    def _run(self, call: MethodCall) -> object:
        method = self._find(call.method)
        args, kwargs = parse_json(call.args), parse_json(call.kwargs)
        # Before the call, so that a TypeError of the method itself is not taken for one of its arguments.
        try:
            inspect.signature(method).bind(self._rank, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"the arguments do not fit the method: {error}") from error
        return method(self._rank, *args, **kwargs)

    def _find(self, name: str) -> Method:
        if name in BUILT_IN:
            return BUILT_IN[name]
        # Loaded at its first call: a package that cannot be imported costs an answer, not the engine.
        if name in self._plugins:
            method: Method = self._plugins[name].load()
            return method
        known = ", ".join(sorted({*BUILT_IN, *self._plugins}))
        raise LookupError(f"there is no method {name!r}; there are {known}")


def ping(rank: Rank, /) -> dict[str, Any]:
    """Who answers."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "rank": rank.rank, "num_ranks": rank.num_ranks}


def memory(rank: Rank, /) -> dict[str, Any]:
    """Of the device: bytes that this process holds, and bytes that are free; the size of the KV cache."""
    cache = rank.cache
    return {
        "device": str(rank.device),
        "used_bytes": _used(rank.device),
        "free_bytes": free_memory(rank.device),
        "kv_bytes": cache.nbytes,
        "kv_blocks": cache.num_blocks,
        "kv_host_blocks": cache.num_host_blocks,
        "tokens_per_kv_block": cache.tokens_per_block,
    }


def versions(_: Rank, /) -> dict[str, str | None]:
    """Of Python, the packages that compute, and CUDA; None: not installed."""
    own = {"python": platform.python_version(), "sluice": build_version(), "cuda": torch.version.cuda}
    return own | {name: _version(name) for name in PACKAGES}


BUILT_IN: dict[str, Method] = {"memory": memory, "ping": ping, "versions": versions}


def _used(device: torch.device) -> int | None:
    """None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.is_file() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

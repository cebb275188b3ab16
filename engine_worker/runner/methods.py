"""Methods that are called by name on a rank, between two steps: BUILT_IN and those of the entry point group GROUP.

A method is called as `method(rank, *args, **kwargs)` and returns a value that JSON can represent. A call may name
several ranks: rank 0 runs it between its steps, the other ranks receive it as a command.
"""

import inspect
import os
import platform
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_worker.runner.finished import Finished
from engine_worker.runner.memory import free_memory
from sluice.host.installation import BUILD_VERSION
from sluice.wire.calls import MAX_JSON_BYTES, MethodCall, RankAnswer, failed, parse_json, to_json

GROUP = "sluice.engine_methods"
PACKAGES = ("torch", "transformers", "flash-attn", "triton", "openvino")
STATM = Path("/proc/self/statm")
Method = Callable[..., object]
Poll = Callable[[], list[RankAnswer] | None]


class Blocks(Protocol):
    """The interface that all KV caches share."""

    num_blocks: int
    num_host_blocks: int
    tokens_per_block: int

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks on the device."""


@dataclass(frozen=True)
class Rank:
    """The first argument of every method: what it may use."""

    rank: int
    num_ranks: int
    device: torch.device
    model: Any
    """With torch a `Model`, this rank's shard; with OpenVINO its compiled model."""
    cache: Blocks
    """With torch a `KVCache`."""


class Methods:
    """Runs methods on one rank. Not thread-safe."""

    def __init__(self, rank: Rank, plugins: Iterable[EntryPoint] | None = None) -> None:
        """`plugins`: replace the installed entry points. A built-in method cannot be overridden."""
        self._rank = rank
        methods = entry_points(group=GROUP) if plugins is None else plugins
        self._plugins = {plugin.name: plugin for plugin in methods}

    @torch.inference_mode()
    def answer(self, call: MethodCall) -> RankAnswer:
        """Run a method. Its exceptions are answers too."""
        number = self._rank.rank
        try:
            value = to_json(self._run(call))
        except BaseException as error:  # noqa: BLE001 - a method's error must not end the engine
            return failed(number, f"{type(error).__name__}: {error}")
        if len(value) > MAX_JSON_BYTES:
            return failed(
                number, f"ValueError: the returned value has {len(value)} bytes as JSON, more than {MAX_JSON_BYTES}"
            )
        return RankAnswer(number, value)

    def _run(self, call: MethodCall) -> object:
        method = self._find(call.method)
        args, kwargs = parse_json(call.args), parse_json(call.kwargs)
        # Checked before the call, so that a TypeError within the method is not reported as one of its arguments.
        try:
            inspect.signature(method).bind(self._rank, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"the arguments do not fit the method: {error}") from error
        return method(self._rank, *args, **kwargs)

    def _find(self, name: str) -> Method:
        if name in BUILT_IN:
            return BUILT_IN[name]
        # Loaded when it is called, so that a package that cannot be imported fails the call and not the engine.
        if name in self._plugins:
            method: Method = self._plugins[name].load()
            return method
        known = ", ".join(sorted({*BUILT_IN, *self._plugins}))
        raise LookupError(f"there is no method {name!r}; there are {known}")


def ping(rank: Rank, /) -> dict[str, Any]:
    """Identifies the process of the rank."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "rank": rank.rank, "num_ranks": rank.num_ranks}


def memory(rank: Rank, /) -> dict[str, Any]:
    """Memory of the device: bytes that this process uses, and bytes that are free; size of the KV cache."""
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
    """Versions of Python, Sluice, CUDA and the packages that compute; None: not installed."""
    found = {"python": platform.python_version(), "sluice": BUILD_VERSION, "cuda": torch.version.cuda}
    return found | {name: _version(name) for name in PACKAGES}


BUILT_IN: dict[str, Method] = {"memory": memory, "ping": ping, "versions": versions}


def _used(device: torch.device) -> int | None:
    """Bytes that this process uses; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.is_file() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class PendingCall:
    """See `engine_worker.protocol.PendingCall`."""

    def __init__(
        self, rank_0: "Future[RankAnswer] | Finished[RankAnswer] | None", others: Poll, refused: list[RankAnswer]
    ) -> None:
        """`rank_0`: answer of rank 0, if the call names it. `others`: polls the other ranks. `refused`: answers for
        ranks that do not exist."""
        self._rank_0 = rank_0
        self._others = others
        self._refused = refused

    def poll(self) -> list[RankAnswer] | None:
        if self._rank_0 is not None and not self._rank_0.done():
            return None
        others = self._others()
        if others is None:
            return None
        rank_0 = [] if self._rank_0 is None else [self._rank_0.result()]
        return [*rank_0, *others, *self._refused]


def refused(call: MethodCall, num_ranks: int) -> list[RankAnswer]:
    """An answer for each rank that the call names and that does not exist."""
    error = f"this rank does not exist: the engine's last rank is {num_ranks - 1}"
    return [failed(rank, error) for rank in sorted(set(call.ranks)) if rank >= num_ranks]

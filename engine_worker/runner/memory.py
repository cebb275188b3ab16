"""Sizes the KV cache by the free memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner.config import RunnerConfig
from sluice.settings.engine import SMALLEST_BLOCK

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# On a GPU the rest is for CUDA graphs; on a CPU, for everything else on the machine.
FRACTION = {"cpu": 0.5, "cuda": 0.9}
"""Default fraction of the free memory for the KV caches of all engines on this machine, or on this GPU."""
BEFORE = {"cpu": "loading", "cuda": "loading and a step of the largest size"}
"""What was allocated before the KV cache is sized, for the error."""
MAX_TABLE_ROWS = 2**31 - 1
"""Limit on slots times KV heads, which the CPU backend indexes with 32 bits."""


class MemoryTooSmallError(ValueError):
    """The KV cache or a step does not fit; the message has the numbers."""


def free_memory(device: torch.device) -> int:
    """Bytes. On a CPU, inside a container, no more than its limit (cgroup v2) leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit, used = _read("memory.max"), _read("memory.current")
    if limit in ("", "max") or not used:
        return _available()
    return min(_available(), max(0, int(limit) - int(used)))


def total_memory(device: torch.device) -> int:
    """Bytes, of which a part is in use. On a CPU with swap space, inside a container its limit (cgroup v2)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = (_meminfo("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) + _meminfo("SwapTotal")
    limit = _read("memory.max")
    return machine if limit in ("", "max") else min(machine, int(limit))


def check_memory(config: RunnerConfig, weight_bytes: int, token_bytes: int, device: torch.device) -> None:
    """Raises MemoryTooSmallError if a rank's weights and the smallest KV cache can never fit."""
    ranks = config.ranks_here if device.type == "cpu" else 1
    tokens = config.tokens_per_block or SMALLEST_BLOCK
    cache_name = "a block of the KV cache"
    if config.kv_cache_tokens is not None and config.kv_memory_fraction is None:
        tokens, cache_name = config.kv_cache_tokens, f"kv_cache_tokens = {config.kv_cache_tokens}"
    weights, cache, total = weight_bytes * ranks >> 20, tokens * token_bytes * ranks >> 20, total_memory(device) >> 20
    if weights + cache > total:
        raise MemoryTooSmallError(
            f"the model's weights take {weights} MiB and {cache_name} {cache} MiB, but device = {device.type} has only "
            f"{total} MiB in total"
        )


def count_blocks(
    config: RunnerConfig, block_bytes: int, num_kv_heads: int, max_context: int, device: torch.device
) -> int:
    """Number of blocks on the device: by `kv_cache_tokens`, by memory, or the smaller of both.

    Without `kv_cache_tokens`, no more than a batch of sequences of `max_context` tokens can fill. `tokens_per_block`
    must be set. Raises MemoryTooSmallError.
    """
    limits = [MAX_TABLE_ROWS // (config.tokens_per_block * num_kv_heads)]
    if config.kv_cache_tokens is None:
        limits.append(config.max_batch_size * -(-max_context // config.tokens_per_block))
    else:
        limits.append(_by_tokens(config.kv_cache_tokens, config.tokens_per_block))
    if config.kv_cache_tokens is None or config.kv_memory_fraction is not None:
        limits.append(_by_memory(config, block_bytes, device))
    blocks = min(limits)
    # A GPU allocates the whole cache now; on a CPU pages are allocated when they are first written.
    if device.type == "cuda" and (needed := blocks * block_bytes) > (free := free_memory(device)):
        raise MemoryTooSmallError(
            f"kv_cache_tokens = {config.kv_cache_tokens} need {needed >> 20} MiB, but only {free >> 20} MiB are free"
        )
    return blocks


class PoolSizes(NamedTuple):
    num_blocks: int
    """On the device."""
    num_host_blocks: int
    file: PoolFile | None
    """With the blocks of one of the pools."""


OpenPool = Callable[[object, Callable[[], int]], PoolFile | None]
"""`PoolFolder.open` for a layout."""


def size_pools(
    config: RunnerConfig,
    block_bytes: int,
    count: Callable[[], int],
    device: torch.device,
    open_pool: OpenPool | None = None,
    *,
    on_host: bool = False,
) -> PoolSizes:
    """The sizes of the block pools. `count`: from `count_blocks`. `on_host`: whether the file has the blocks of the
    host pool. A file that is adopted has a size already: it occupies the memory that `count` would find free. Raises
    MemoryTooSmallError."""
    if open_pool is not None and on_host:
        num_blocks = count()

        def count_host() -> int:
            return count_host_blocks(config, block_bytes, num_blocks, device)

        file = open_pool((config.kv_host_memory, block_bytes), count_host)
        return PoolSizes(num_blocks, count_host() if file is None else file.num_blocks, file)
    settings = (
        config.kv_cache_tokens, config.kv_memory_fraction, config.engines_here, config.max_batch_size, block_bytes
    )  # fmt: skip
    file = None if open_pool is None else open_pool(settings, count)
    num_blocks = count() if file is None else file.num_blocks
    # The file's blocks that have memory already do not need what is free.
    new_blocks = num_blocks if file is None else max(0, num_blocks - file.used_bytes // file.layout.block_bytes)
    return PoolSizes(num_blocks, count_host_blocks(config, block_bytes, new_blocks, device), file)


def count_host_blocks(config: RunnerConfig, block_bytes: int, num_blocks: int, device: torch.device) -> int:
    """Number of blocks in host memory, in addition to `num_blocks` on the device whose memory is still free. Raises
    MemoryTooSmallError."""
    requested, cpu = config.kv_host_memory, torch.device("cpu")
    if not requested:
        return 0
    if requested < block_bytes:
        raise MemoryTooSmallError(
            f"kv_host_memory = {requested} bytes is less than the {block_bytes} "
            f"that a block of {config.tokens_per_block} tokens takes"
        )
    # On a CPU both pools share the memory, and the device blocks are not written yet.
    free = free_memory(cpu) - (num_blocks * block_bytes if device == cpu else 0)
    if requested > free:
        raise MemoryTooSmallError(f"kv_host_memory = {requested >> 20} MiB, but {max(0, free) >> 20} MiB are left")
    return requested // block_bytes


def fraction_of(config: RunnerConfig, device: torch.device) -> float:
    """Fraction of `_available_to_cache` for the KV cache: the setting, or this engine's share of the default."""
    if config.kv_memory_fraction is not None:
        return config.kv_memory_fraction
    return FRACTION[device.type] / (config.engines_here if device.type == "cpu" else 1)


def _available_to_cache(config: RunnerConfig, device: torch.device) -> int:
    """Memory, in bytes, of which the KV cache gets a fraction."""
    free = free_memory(device)
    if device.type == "cpu" or config.engines_per_gpu == 1 or config.kv_memory_fraction is not None:
        return free
    # Engines that share a GPU load at different times and see different amounts of free memory. So each gets an equal
    # share of the whole GPU, less what it has already reserved.
    share = torch.cuda.mem_get_info(device)[1] // config.engines_per_gpu
    return max(0, min(free, share - torch.cuda.memory_reserved(device)))


def _by_tokens(tokens: int, tokens_per_block: int) -> int:
    if tokens < tokens_per_block:
        raise MemoryTooSmallError(f"kv_cache_tokens = {tokens} is less than one block of {tokens_per_block} tokens")
    return tokens // tokens_per_block


def _by_memory(config: RunnerConfig, block_bytes: int, device: torch.device) -> int:
    fraction = fraction_of(config, device)
    available = _available_to_cache(config, device)
    blocks = int(available * fraction) // block_bytes
    if blocks < 1:
        raise MemoryTooSmallError(
            f"no memory for the KV cache: {available >> 20} MiB are free after {BEFORE[device.type]}, "
            f"{fraction:.0%} of which are for the KV cache, "
            f"and a block of {config.tokens_per_block} tokens takes {block_bytes / 2**20:.2f} MiB"
        )
    return blocks


def _read(name: str) -> str:
    file = CGROUP / name
    return file.read_text().strip() if file.is_file() else ""


def _available() -> int:
    # Not on Linux: assume that half of the physical memory is free.
    return _meminfo("MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _meminfo(name: str) -> int:
    """Bytes. 0 if the system does not report this."""
    lines = MEMINFO.read_text().splitlines() if MEMINFO.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)

"""How many blocks the KV cache gets."""

import torch

from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.machine import free_memory

FRACTION = {"cpu": 0.3, "cuda": 0.9}
MAX_TABLE_ROWS = 2**31 - 1
"""Slots times KV heads: the CPU backend counts them in 32 bits."""


class MemoryTooSmallError(ValueError):
    """No KV cache of a useful size fits; the message has the numbers."""


def count_blocks(
    config: RunnerConfig, block_bytes: int, num_kv_heads: int, max_context: int, device: torch.device
) -> int:
    """Blocks of `tokens_per_block` tokens and `block_bytes` bytes each."""
    size = config.tokens_per_block
    most = MAX_TABLE_ROWS // (size * num_kv_heads)
    if config.kv_cache_tokens is not None:
        if config.kv_cache_tokens < size:
            raise MemoryTooSmallError(
                f"kv_cache_tokens = {config.kv_cache_tokens} is less than one block of {size} tokens"
            )
        return min(config.kv_cache_tokens // size, most)
    fraction = FRACTION[device.type] if config.kv_memory_fraction is None else config.kv_memory_fraction
    free = free_memory(device)
    blocks = int(free * fraction) // block_bytes
    if blocks < 1:
        raise MemoryTooSmallError(
            f"no memory for the KV cache: {free >> 20} MiB are free after loading, {fraction:.0%} of them are for it, "
            f"and a block of {size} tokens takes {block_bytes / 2**20:.2f} MiB"
        )
    return min(blocks, config.max_batch_size * -(-max_context // size), most)

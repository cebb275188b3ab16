"""Keys and values of a step's tokens into their slots, for all backends on a GPU: one layout, one way in."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.attention.cache import LayerCache

Store = Callable[[LayerCache, Tensor, Tensor, Tensor], None]
"""Key and value [T, kv_heads, head_dim] to slots [T] int64; -1 writes nothing."""


def masked(cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """In torch; the host waits for the number of tokens that are no padding."""
    stored = slots >= 0
    cache.store(key[stored], value[stored], slots[stored])


def store_on(device: torch.device) -> Store:
    """Both in one launch that nobody waits for where this torch has Triton; `masked` elsewhere."""
    if device.type != "cuda":
        return masked
    try:
        from engine_worker.attention.kernels import store
    except ImportError:
        return masked
    return store

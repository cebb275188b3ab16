"""Keys and values of a step's tokens into their slots, for all backends on a GPU: one layout, two ways in. Nobody waits
for either, and graphs hold both."""

from collections.abc import Callable

from torch import Tensor

from engine_worker.attention.cache import LayerCache

Store = Callable[[LayerCache, Tensor, Tensor, Tensor], None]
"""Key and value [T, kv_heads, head_dim] to slots [T] int64; -1 writes nothing that is read."""


def plain(cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """In torch: padding goes to the spare slot, for the host does not know how much there is."""
    cache.store(key, value, slots.masked_fill(slots < 0, cache.spare))


def fused() -> Store:
    """Both in one launch, by Triton. Raises ModuleNotFoundError where there is none."""
    from engine_worker.attention.kernels import store

    return store

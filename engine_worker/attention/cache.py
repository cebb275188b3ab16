"""The paged KV cache: one pool of blocks, the same for all layers."""

import math
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from engine_worker.step import Move, MoveKind


class LayerCache:
    """One layer's blocks, in flash-attn's paged layout, and the same memory in other shapes."""

    __slots__ = ("_key_slots", "_value_slots", "key_columns", "keys", "value_rows", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        """Each [num_blocks, tokens_per_block, kv_heads, head_dim]."""
        self.key_columns = keys.view(-1, keys.shape[-1]).t()
        """[head_dim, slots * kv_heads]."""
        self.value_rows = values.view(-1, values.shape[-1])
        """[slots * kv_heads, head_dim]."""
        self._key_slots = keys.flatten(0, 1)
        self._value_slots = values.flatten(0, 1)

    def store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write key and value [T, kv_heads, head_dim] to slots [T] int64, none of them negative."""
        self._key_slots.index_copy_(0, slots, key)
        self._value_slots.index_copy_(0, slots, value)


class KVCache:
    """Keys and values of all layers. Blocks start as zeros, so that what was never written is still a number."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_blocks, tokens_per_block, num_kv_heads, head_dim)
        self._blocks = _zeros(shape, dtype, device)
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.dtype = dtype
        self.layers = tuple(LayerCache(self._blocks[0, i], self._blocks[1, i]) for i in range(num_layers))

    def move(self, moves: Iterable[Move]) -> None:
        """Carry out moves in order, in every layer. Raises ValueError on one to or from the host: there is none."""
        for kind, source, target in moves:
            if kind is not MoveKind.COPY:
                raise ValueError(f"no host memory to {kind.value} block {source} to {target}")
            self._blocks[:, :, target] = self._blocks[:, :, source]

    @staticmethod
    def block_bytes(
        num_layers: int, tokens_per_block: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory of one block over all layers."""
        return 2 * num_layers * tokens_per_block * num_kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU from fresh pages, which take memory once they are written: torch would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

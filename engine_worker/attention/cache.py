"""The paged KV cache (PagedAttention, arXiv:2309.06180). A block number refers to the same slots in every layer."""

import math
import mmap
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from engine_worker.attention.saver import BlockSaver, Saved, side_stream
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Move, MoveKind


class LayerCache:
    """One layer's blocks, in flash-attn's paged layout, and views of the same memory in other shapes."""

    __slots__ = ("_key_slots", "_value_slots", "key_columns", "keys", "spare", "value_rows", "values")

    def __init__(self, keys: Tensor, values: Tensor, tokens_per_block: int) -> None:
        """keys, values: each [slots + 1, kv_heads, head_dim]. The last slot is in no block, so it is never read."""
        self._key_slots = keys
        self._value_slots = values
        self.spare = len(keys) - 1
        """The last slot: keys and values of padding are written to it."""
        blocks = (self.spare // tokens_per_block, tokens_per_block)
        self.keys, self.values = (pool[:-1].unflatten(0, blocks) for pool in (keys, values))
        """Each [num_blocks, tokens_per_block, kv_heads, head_dim]."""
        self.key_columns = self.keys.view(-1, keys.shape[-1]).t()
        """[head_dim, slots * kv_heads]."""
        self.value_rows = self.values.view(-1, values.shape[-1])
        """[slots * kv_heads, head_dim]."""

    def store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write key and value [T, kv_heads, head_dim] to slots [T] int64, none negative."""
        self._key_slots.index_copy_(0, slots, key)
        self._value_slots.index_copy_(0, slots, value)

    def copy(self) -> "LayerCache":
        return LayerCache(self._key_slots.clone(), self._value_slots.clone(), self.keys.shape[1])


def store_by_torch(cache: LayerCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write key and value [T, kv_heads, head_dim] to slots [T] int64; slot -1 (padding) is redirected to the spare."""
    # A boolean mask instead would make the host wait for the device, to learn how many tokens are padding.
    cache.store(key, value, slots.masked_fill(slots < 0, cache.spare))


class KVCache:
    """Keys and values of all layers, and a second pool in host memory for evicted blocks.

    Blocks start as zeros: attention multiplies unwritten slots by a weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        file: PoolFile | None = None,
    ) -> None:
        """`file`: with `layout`, for the blocks of a CPU, or with `host_layout`, for those of the host pool."""
        slot = (num_kv_heads, head_dim)
        shape = (2, num_layers, num_blocks * tokens_per_block + 1, *slot)
        host_shape = (num_host_blocks, 2, num_layers, tokens_per_block, *slot)
        on_host = file is not None and file.layout.on_host
        slots = zeros(shape, dtype, device) if file is None or on_host else _in_file(file, shape, dtype)
        self._blocks = slots[:, :, :-1].unflatten(2, (num_blocks, tokens_per_block))
        self._saver: BlockSaver | None = None
        self._saved: Saved | None = None
        if file is None or not on_host:
            self._host_blocks = self._pinned(zeros(host_shape, dtype, torch.device("cpu")), device)
        else:
            file.reserve_all()
            blocks = torch.from_numpy(file.parts[0][:-1]).view(dtype)
            self._host_blocks = self._pinned(blocks.view(host_shape), device)
            self._saver = BlockSaver(self._blocks, self._host_blocks, side_stream(device), file.note_sum)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens_per_block = tokens_per_block
        self.dtype = dtype
        self.layers = tuple(LayerCache(slots[0, i], slots[1, i], tokens_per_block) for i in range(num_layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks on the device."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks of all layers, one move after the other. On CUDA the copies are queued on the current stream, and
        those to save in another one. Call it before anything else of a step is queued."""
        saves = list[tuple[int, int]]()
        if self._saver is not None:
            self._saver.join()
        for kind, source, target in moves:
            match kind:
                case MoveKind.SAVE:
                    saves.append((source, target))
                case MoveKind.COPY:
                    self._blocks[:, :, target] = self._blocks[:, :, source]
                # A host block is contiguous over all layers, so that a move is one contiguous range of host memory.
                case MoveKind.OFFLOAD:
                    self._host_blocks[target].copy_(self._blocks[:, :, source], non_blocking=True)
                case MoveKind.ONLOAD:
                    self._blocks[:, :, target].copy_(self._host_blocks[source], non_blocking=True)
        # The draft model's blocks are in no file: its part of a full block may not be computed yet.
        self._saved = self._saver.save(saves) if saves and self._saver is not None else None

    def take_saved(self) -> Saved | None:
        """Remove and return the copies that the latest call of `move` began; None: it began none."""
        saved, self._saved = self._saved, None
        return saved

    def _pinned(self, blocks: Tensor, device: torch.device) -> Tensor:
        """Pin host memory if the device is a GPU, as long as this cache exists, so that copies are asynchronous."""
        if device.type == "cuda" and blocks.nbytes:
            # Not by torch's pinned allocator, which rounds up to a power of two and so may take almost twice the
            # memory.
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(blocks.data_ptr(), blocks.nbytes, 0))
            # At the end of the process CUDA may have been shut down already.
            weakref.finalize(self, cudart.cudaHostUnregister, blocks.data_ptr()).atexit = False
        return blocks

    @staticmethod
    def block_bytes(
        num_layers: int, tokens_per_block: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one block over all layers."""
        return 2 * num_layers * tokens_per_block * num_kv_heads * head_dim * dtype.itemsize


# Another version of torch may compute other bits, and an adopted block must be what the engine itself would compute.
def layout(num_layers: int, tokens_per_block: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Layout:
    """Of a file with the blocks of a KVCache."""
    name = f"torch {torch.__version__} {dtype} {num_kv_heads} heads of {head_dim}"
    size = tokens_per_block * num_kv_heads * head_dim * dtype.itemsize
    return Layout(name, tokens_per_block, (size,) * (2 * num_layers))


def host_layout(num_layers: int, tokens_per_block: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Layout:
    """Of a file with the host blocks of a KVCache."""
    name = f"torch {torch.__version__} {dtype} {num_layers} layers {num_kv_heads} heads of {head_dim}"
    size = KVCache.block_bytes(num_layers, tokens_per_block, num_kv_heads, head_dim, dtype)
    return Layout(name, tokens_per_block, (size,), on_host=True)


def _in_file(file: PoolFile, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of shape [2, num_layers, slots, kv_heads, head_dim] in the memory of a file."""
    parts = torch.from_numpy(file.region).view(dtype).unflatten(0, shape[:2])
    return parts[:, :, : math.prod(shape[2:])].unflatten(2, shape[2:])


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU its pages take memory only once they are written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write them all now.
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)

"""The paged KV cache in the layout of OpenVINO's attention, in memory that we allocate."""

import math
from collections.abc import Iterable

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from engine_worker.attention.cache import zeros
from engine_worker.openvino.graph import INPUTS
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Move
from sluice.settings.engine import OPENVINO_BLOCK

CPU = torch.device("cpu")


class BlockShape:
    """Shape and bytes of one block in each cache tensor. Blocks are copied as opaque bytes, since quantized blocks
    contain their scales too."""

    def __init__(self, tensors: list[tuple[list[int], ov.Type]]) -> None:
        """tensors: shape and type of a block; keys and values of each layer in turn."""
        self.tensors = tensors
        self.sizes = [math.prod(shape) * kind.size for shape, kind in tensors]
        self.nbytes = sum(self.sizes)

    @property
    def layout(self) -> Layout:
        """Of a file with such blocks. Their bytes are opaque: another version may give them another meaning."""
        name = f"openvino {ov.__version__} {[(shape, kind.to_string()) for shape, kind in self.tensors]}"
        return Layout(name, OPENVINO_BLOCK, tuple(self.sizes))

    @classmethod
    def of(cls, compiled: ov.CompiledModel, num_layers: int) -> "BlockShape":
        """Of the cache inputs of a compiled decoder: the plugin has chosen shape and type."""
        caches = compiled.inputs[len(INPUTS) : len(INPUTS) + 2 * num_layers]
        return cls(
            [([int(str(size)) for size in list(cache.partial_shape)[1:]], cache.element_type) for cache in caches]
        )


class BlockCache:
    """Keys and values of all layers, and a second pool in host memory for evicted blocks.

    Blocks start as zeros, like those of `engine_worker.attention.cache.KVCache`. One block is allocated beyond
    `num_blocks`, for the sequence that pads small batches; see `arrays.build_pass`.
    """

    def __init__(
        self, block: BlockShape, num_blocks: int, num_host_blocks: int = 0, file: PoolFile | None = None
    ) -> None:
        """`file`: with the layout of `block`."""
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens_per_block = OPENVINO_BLOCK
        self.nbytes = block.nbytes * num_blocks
        self.spare = num_blocks
        """Number of the padding sequence's block."""
        self._blocks = _zeros(num_blocks + 1, block) if file is None else file.parts
        self._host = _zeros(num_host_blocks, block)
        self.tensors = [
            ov.Tensor(blocks, ov.Shape([num_blocks + 1, *shape]), kind)
            for blocks, (shape, kind) in zip(self._blocks, block.tensors, strict=True)
        ]
        """The graph's cache inputs, in the order of `BlockShape.tensors`; they share the memory of the blocks."""

    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks of all layers, one move after the other."""
        for kind, source, target in moves:
            from_host, to_host = kind.from_host, kind.to_host
            for blocks, host in zip(self._blocks, self._host, strict=True):
                (host if to_host else blocks)[target] = (host if from_host else blocks)[source]


def _zeros(num_blocks: int, block: BlockShape) -> list[NDArray[np.uint8]]:
    """[num_blocks, bytes] of each tensor."""
    return [zeros((num_blocks, size), torch.uint8, CPU).numpy() for size in block.sizes]

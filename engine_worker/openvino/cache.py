"""The paged KV cache in the layout of OpenVINO's attention, in memory that we allocate."""

import math
import mmap
from collections.abc import Iterable

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from engine_worker.step import Move, MoveKind
from sluice.settings.engine import OPENVINO_BLOCK


class BlockShape:
    """Shape and bytes of one block in each cache tensor. Blocks are copied as opaque bytes, since quantized blocks
    contain their scales too."""

    def __init__(self, tensors: list[tuple[list[int], ov.Type]]) -> None:
        """tensors: shape and type of a block; keys and values of each layer in turn."""
        self.tensors = tensors
        self.sizes = [math.prod(shape) * kind.size for shape, kind in tensors]
        self.nbytes = sum(self.sizes)


class BlockCache:
    """Keys and values of all layers, and a second pool in host memory for evicted blocks.

    One block is allocated beyond `num_blocks`, for the sequence that pads small batches; see `arrays.prepared_step`.
    """

    def __init__(self, block: BlockShape, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens_per_block = OPENVINO_BLOCK
        self.nbytes = block.nbytes * num_blocks
        self.spare = num_blocks
        """Number of the padding sequence's block."""
        self._blocks = [_zeros(num_blocks + 1, size) for size in block.sizes]
        self._host = [_zeros(num_host_blocks, size) for size in block.sizes]
        self.tensors = [
            ov.Tensor(blocks, ov.Shape([num_blocks + 1, *shape]), kind)
            for blocks, (shape, kind) in zip(self._blocks, block.tensors, strict=True)
        ]
        """The graph's cache inputs, in the order of `BlockShape.tensors`; they share the memory of the blocks."""

    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks of all layers, one move after the other."""
        for kind, source, target in moves:
            from_host, to_host = kind is MoveKind.ONLOAD, kind is MoveKind.OFFLOAD
            for blocks, host in zip(self._blocks, self._host, strict=True):
                (host if to_host else blocks)[target] = (host if from_host else blocks)[source]


def _zeros(rows: int, size: int) -> NDArray[np.uint8]:
    """[rows, size]. Pages take memory only once they are written. Zeros, since attention multiplies unwritten slots by
    a weight of 0, and 0 * NaN is NaN."""
    if not rows:
        return np.zeros((0, size), np.uint8)
    return np.frombuffer(mmap.mmap(-1, rows * size), np.uint8).reshape(rows, size)

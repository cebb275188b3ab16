"""Weight matrices as constants of the graph: float32, or quantized to int8 or int4."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as op
from torch import Tensor

Keep = Callable[[NDArray[Any]], NDArray[Any]]
"""See `ConstantStore.keep`."""

INT8_MAX = 127
INT4_MIN = -8
GROUP = 64
"""Consecutive inputs that share a scale in int4."""
PART = 1 << 16
"""Elements quantized per iteration: few enough for the CPU's cache."""


class Format(Protocol):
    """How the graph stores a weight matrix [outputs, inputs]."""

    def node(self, matrix: Tensor) -> ov.Node:
        """matrix float32 -> a node of the same shape that evaluates to float32."""

    def rounded(self, matrix: Tensor) -> Tensor:
        """The values that `node` evaluates to."""


@dataclass(frozen=True)
class Plain:
    """Not quantized: float32."""

    keep: Keep

    def node(self, matrix: Tensor) -> ov.Node:
        return _shared(self.keep(matrix.detach().numpy()))

    def rounded(self, matrix: Tensor) -> Tensor:
        return matrix


@dataclass(frozen=True)
class Int8:
    """Symmetric, one scale per output. OpenVINO quantizes the other operand of a product dynamically."""

    keep: Keep

    def node(self, matrix: Tensor) -> ov.Node:
        values, scales = quantize_rows(matrix)
        return op.multiply(op.convert(_shared(self.keep(values.numpy())), ov.Type.f32), constant(scales))

    def rounded(self, matrix: Tensor) -> Tensor:
        values, scales = quantize_rows(matrix)
        return values * scales


@dataclass(frozen=True)
class Int4:
    """Symmetric, one scale per output and group of inputs. The plugin recognizes only this pattern of operations and
    otherwise expands the weights to more than 4 bits."""

    keep: Keep

    def node(self, matrix: Tensor) -> ov.Node:
        values, scales = quantize_groups(matrix)
        packed = ov.Tensor(self.keep(pack_pairs(values).numpy()), ov.Shape(list(values.shape)), ov.Type.i4)
        product = op.multiply(op.convert(op.constant(packed), ov.Type.f32), constant(scales))
        return op.reshape(product, op.constant(np.array(matrix.shape, np.int64)), False)

    def rounded(self, matrix: Tensor) -> Tensor:
        values, scales = quantize_groups(matrix)
        return (values * scales).view(matrix.shape)


class Weights(NamedTuple):
    """The formats of a decoder's matrices."""

    layers: Format
    vocabulary: Plain | Int8
    """Format of the embedding and the head. Never int4: no later layer evens out their errors."""


def formats(quantize: str, keep: Keep) -> Weights:
    """The formats for a value of the setting `quantize`."""
    plain, int8, int4 = Plain(keep), Int8(keep), Int4(keep)
    return {"none": Weights(plain, plain), "int8": Weights(int8, int8), "int4": Weights(int4, int8)}[quantize]


def constant(values: Tensor) -> ov.Node:
    """A constant that shares the tensor's memory."""
    return _shared(values.detach().numpy())


def rows_of(table: Plain | Int8, matrix: Tensor, ids: ov.Node) -> ov.Node:
    """Embedding lookup: ids [T] -> those rows of the matrix [T, inputs] float32."""
    axis = op.constant(np.int64(0))
    if isinstance(table, Plain):
        return op.gather(table.node(matrix), ids, axis)
    # Gather first, then dequantize: the plugin would otherwise keep the whole dequantized matrix.
    values, scales = quantize_rows(matrix)
    rows = op.gather(_shared(table.keep(values.numpy())), ids, axis)
    return op.multiply(op.convert(rows, ov.Type.f32), op.gather(constant(scales), ids, axis))


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [N, K] float32 -> values [N, K] int8, scales [N, 1] float32; values * scales approximates the matrix."""
    values, scales = torch.empty(matrix.shape, dtype=torch.int8), torch.empty(len(matrix), 1)
    for part in _parts(matrix):
        scales[part] = _no_zeros(matrix[part].abs().amax(dim=1, keepdim=True) / INT8_MAX)
        values[part] = (matrix[part] / scales[part]).round_()
    return values, scales


def quantize_groups(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [N, K] float32 -> values [N, K / group, group] int8 from -8 to 7, scales [N, K / group, 1] float32. The
    group is GROUP, or a divisor of it where K is not a multiple of GROUP."""
    group = math.gcd(matrix.shape[1], GROUP)
    groups = matrix.reshape(len(matrix), -1, group)
    values, scales = torch.empty(groups.shape, dtype=torch.int8), torch.empty(*groups.shape[:2], 1)
    for part in _parts(matrix):
        lowest, highest = groups[part].aminmax(dim=2, keepdim=True)
        # The element of the largest magnitude becomes -8, even if it is positive (the scale is then negative): int4
        # has no 8.
        scales[part] = _no_zeros(torch.where(-lowest >= highest, lowest, highest) / INT4_MIN)
        values[part] = (groups[part] / scales[part]).round_().clamp_(max=-INT4_MIN - 1)
    return values, scales


def pack_pairs(values: Tensor) -> Tensor:
    """An even number of int8 values from -8 to 7 -> uint8, two values per byte, the first in the lower 4 bits."""
    pairs = values.view(torch.uint8).view(-1, 2)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _parts(matrix: Tensor) -> Iterator[slice]:
    """Ranges of rows with about PART elements each."""
    rows = max(1, PART // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def _no_zeros(scales: Tensor) -> Tensor:
    """Rows or groups of zeros get the scale 1, to avoid a division by zero."""
    return torch.where(scales == 0, 1.0, scales)


def _shared(array: NDArray[Any]) -> ov.Node:
    return op.constant(array, shared_memory=True)

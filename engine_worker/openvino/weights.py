"""Weights as constants of the graph, plain or quantized."""

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
"""See `Store.keep`."""

INT8_MAX = 127
INT4_LEAST = -8
GROUP = 64
"""Inputs that share a scale in int4."""
PART = 1 << 16
"""Elements that are quantized at once: they stay in the CPU's cache."""


class Format(Protocol):
    """A matrix [outputs, inputs] float32 in the graph."""

    def node(self, matrix: Tensor) -> ov.Node:
        """Of the same shape, float32."""

    def rounded(self, matrix: Tensor) -> Tensor:
        """The values of `node`."""


@dataclass(frozen=True)
class Plain:
    """float32."""

    keep: Keep

    def node(self, matrix: Tensor) -> ov.Node:
        return _shared(self.keep(matrix.detach().numpy()))

    def rounded(self, matrix: Tensor) -> Tensor:
        return matrix


@dataclass(frozen=True)
class Int8:
    """Symmetric, one scale per output. OpenVINO quantizes the other operand of a product itself, as it runs."""

    keep: Keep

    def node(self, matrix: Tensor) -> ov.Node:
        values, scales = quantize_rows(matrix)
        return op.multiply(op.convert(_shared(self.keep(values.numpy())), ov.Type.f32), constant(scales))

    def rounded(self, matrix: Tensor) -> Tensor:
        values, scales = quantize_rows(matrix)
        return values * scales


@dataclass(frozen=True)
class Int4:
    """Symmetric, one scale per output and group of inputs; the plugin keeps them in 4 bits only if written so."""

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
    """Of the embedding and the head, whose errors no later layer evens out."""


def formats(quantize: str, keep: Keep) -> Weights:
    """By the setting `quantize`."""
    plain, int8, int4 = Plain(keep), Int8(keep), Int4(keep)
    return {"none": Weights(plain, plain), "int8": Weights(int8, int8), "int4": Weights(int4, int8)}[quantize]


def constant(values: Tensor) -> ov.Node:
    """It shares the tensor's memory."""
    return _shared(values.detach().numpy())


def rows_of(table: Plain | Int8, matrix: Tensor, ids: ov.Node) -> ov.Node:
    """Rows [T] of a matrix, as an embedding looks them up: [T, inputs] float32."""
    axis = op.constant(np.int64(0))
    if isinstance(table, Plain):
        return op.gather(table.node(matrix), ids, axis)
    # Gathered before they are converted: the plugin would keep the whole product otherwise.
    values, scales = quantize_rows(matrix)
    found = op.gather(_shared(table.keep(values.numpy())), ids, axis)
    return op.multiply(op.convert(found, ov.Type.f32), op.gather(constant(scales), ids, axis))


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] float32 -> int8 [N, K] and scales float32 [N, 1], whose product is close to the matrix."""
    values, scales = torch.empty(matrix.shape, dtype=torch.int8), torch.empty(len(matrix), 1)
    for part in _parts(matrix):
        scales[part] = _no_zeros(matrix[part].abs().amax(dim=1, keepdim=True) / INT8_MAX)
        values[part] = (matrix[part] / scales[part]).round_()
    return values, scales


def quantize_groups(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] float32 -> int8 from -8 to 7 [N, K / group, group] and scales float32 [N, K / group, 1]."""
    group = math.gcd(matrix.shape[1], GROUP)
    groups = matrix.reshape(len(matrix), -1, group)
    values, scales = torch.empty(groups.shape, dtype=torch.int8), torch.empty(*groups.shape[:2], 1)
    for part in _parts(matrix):
        least, most = groups[part].aminmax(dim=2, keepdim=True)
        # The largest becomes -8, whatever its sign: there is no 8.
        scales[part] = _no_zeros(torch.where(-least >= most, least, most) / INT4_LEAST)
        values[part] = (groups[part] / scales[part]).round_().clamp_(max=-INT4_LEAST - 1)
    return values, scales


def pack_pairs(values: Tensor) -> Tensor:
    """int8 from -8 to 7, an even number of them -> uint8 [half as many], the first of each pair in the lower half."""
    pairs = values.view(torch.uint8).view(-1, 2)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _parts(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, PART // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def _no_zeros(scales: Tensor) -> Tensor:
    """What holds only zeros has no scale of its own."""
    return torch.where(scales == 0, 1.0, scales)


def _shared(array: NDArray[Any]) -> ov.Node:
    return op.constant(array, shared_memory=True)

"""Weights as constants of the graph, plain or quantized."""

from collections.abc import Callable

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

Weights = Callable[[Tensor], ov.Node]
"""A matrix [outputs, inputs] float32 -> a node of the same shape."""

INT8_MAX = 127


def constant(values: Tensor) -> ov.Node:
    """It shares the tensor's memory."""
    return op.constant(values.detach().numpy(), shared_memory=True)


def plain(matrix: Tensor) -> ov.Node:
    return constant(matrix)


def int8(matrix: Tensor) -> ov.Node:
    """Symmetric, one scale per output. OpenVINO quantizes the other operand of a product itself, as it runs."""
    values, scales = quantize_rows(matrix)
    return op.multiply(op.convert(op.constant(values, shared_memory=True), ov.Type.f32), op.constant(scales))


def quantize_rows(matrix: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] float32 -> int8 [N, K] and scales float32 [N, 1], whose product is close to the matrix."""
    scales = matrix.abs().amax(dim=1, keepdim=True) / INT8_MAX
    # A row of zeros has no scale of its own.
    scales = torch.where(scales > 0, scales, 1.0)
    return (matrix / scales).round_().to(torch.int8).numpy(), scales.numpy()


def rows_of(weights: Weights, matrix: Tensor, ids: ov.Node) -> ov.Node:
    """Rows [T] of a matrix, as an embedding looks them up: [T, inputs] float32."""
    axis = op.constant(np.int64(0))
    if weights is plain:
        return op.gather(constant(matrix), ids, axis)
    # Gathered before they are converted: the plugin would keep the whole product otherwise.
    values, scales = quantize_rows(matrix)
    found = op.gather(op.constant(values, shared_memory=True), ids, axis)
    return op.multiply(op.convert(found, ov.Type.f32), op.gather(op.constant(scales), ids, axis))


WEIGHTS: dict[str, Weights] = {"none": plain, "int8": int8}
"""By the setting `quantize`."""

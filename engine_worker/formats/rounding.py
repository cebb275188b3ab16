"""Rounds dense matrices to few bits, for the setting `quantize`."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from engine_worker.formats.packing import pack_pairs
from engine_worker.formats.stored import Stored

INT8_MAX, FP8_MAX, INT4_MAX = 127, 448.0, 15
GROUP = 64
"""Columns that share a scale and a zero in int4."""
ROUNDED = ("proj.weight", "embed_tokens.weight", "lm_head.weight")
"""Ends of the names of matrices that are rounded: not the router of experts."""
LEAST_GROUP = 4
FOUR_BITS = ("q_proj.weight", "gate_proj.weight", "up_proj.weight")
"""Ends of the names of matrices to which int4 gives 4 bits. Errors of the others change the output more: they are
int8."""
PART = 1 << 16
"""Elements rounded per iteration: few enough for a CPU's cache."""

Rounding = Callable[[Tensor], Stored]


def int8(matrix: Tensor) -> Stored:
    """A scale per row, and no zeros."""
    codes, scales = torch.empty_like(matrix, dtype=torch.int8), matrix.new_empty(len(matrix), 1, dtype=torch.float32)
    for part in parts_of(matrix):
        rows = matrix[part].float()
        scales[part] = without_zeros(rows.abs().amax(dim=1, keepdim=True) / INT8_MAX)
        codes[part] = (rows / scales[part]).round_()
    return Stored("i8", codes, scales, None, matrix.shape[1])


def fp8(matrix: Tensor) -> Stored:
    """A scale per row."""
    matrix = matrix.float()
    scales = without_zeros(matrix.abs().amax(dim=1, keepdim=True) / FP8_MAX)
    codes = (matrix / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Stored("f8e4m3", codes, scales, None, matrix.shape[1])


def int4(matrix: Tensor) -> Stored:
    """A scale and an integer zero per row and group of columns. 0 stays 0. The number of columns must be even."""
    rows, columns = matrix.shape
    # A graph of OpenVINO cannot have a last group that is shorter, and its products with groups of 2 are wrong.
    group = math.gcd(columns, GROUP)
    group = columns if group < LEAST_GROUP else group
    scales, zeros = (matrix.new_empty(rows, columns // group, 1, dtype=torch.float32) for _ in range(2))
    codes = matrix.new_empty(rows, columns // group, group, dtype=torch.uint8)
    for part in parts_of(matrix):
        groups = matrix[part].float().reshape(-1, columns // group, group)
        lowest, highest = groups.amin(2, keepdim=True).clamp_(max=0), groups.amax(2, keepdim=True).clamp_(min=0)
        # Scales in bfloat16 take half the memory. Rounded down, the ends of a group may be clamped.
        scales[part] = without_zeros(((highest - lowest) / INT4_MAX).bfloat16().float())
        zeros[part] = (-lowest / scales[part]).round_().clamp_(0, INT4_MAX)
        codes[part] = (groups / scales[part]).round_().add_(zeros[part]).clamp_(0, INT4_MAX)
    return Stored("u4", pack_pairs(codes.view(rows, columns)), scales.squeeze(2), zeros.squeeze(2), group)


ROUNDINGS: Mapping[str, Rounding] = {"int8": int8, "int4": int4, "fp8": fp8}
"""By value of the setting."""
NAMES: Mapping[str, str] = {"none": "none", "int8": "int8", "int4": "int4 in groups of 64", "fp8": "fp8"}
"""What the settings compute, as part of an engine's `dtype`. Another rounding must have another name: engines continue
each other's streams if their names are equal."""


def rounding_of(quantize: str, name: str) -> Rounding | None:
    """How a matrix of this name is rounded with the setting `quantize`; None: it is not."""
    if quantize == "none" or not name.endswith(ROUNDED):
        return None
    return ROUNDINGS["int8" if quantize == "int4" and not name.endswith(FOUR_BITS) else quantize]


def parts_of(matrix: Tensor) -> Iterator[slice]:
    """Ranges of rows with about PART elements each; all rows on a GPU."""
    rows = max(1, PART // matrix.shape[1]) if matrix.device.type == "cpu" else max(1, len(matrix))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def without_zeros(scales: Tensor) -> Tensor:
    """Rows or groups of zeros get the scale 1, to avoid a division by zero."""
    return torch.where(scales == 0, 1.0, scales)

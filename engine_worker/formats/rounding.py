"""Rounds dense matrices to few bits, for the setting `quantize`."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.formats.packing import pack_pairs
from engine_worker.formats.stored import Stored

INT8_MAX, FP8_MAX, INT4_MAX = 127, 448.0, 15
SENSITIVE = ("v_proj.weight", "down_proj.weight")
"""Ends of the names of matrices whose errors change the output most."""
GROUP = 32
"""Columns that share a scale and a zero in int4."""
PART = 1 << 16
"""Elements rounded per iteration: few enough for a CPU's cache."""


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
    """A scale and an integer zero per row and group. 0 stays 0. The number of columns must be even."""
    rows, columns = matrix.shape
    groups = F.pad(matrix.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    lowest, highest = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    # Scales in bfloat16 take half the memory. Rounded down, the ends of a group may be clamped.
    scales = without_zeros(((highest - lowest) / INT4_MAX).bfloat16().float())
    zeros = (-lowest / scales).round_().clamp_(0, INT4_MAX)
    codes = (groups / scales.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, INT4_MAX)
    return Stored("u4", pack_pairs(codes.view(rows, -1)[:, :columns]), scales, zeros, GROUP)


Rounding = Callable[[Tensor], Stored]
ROUNDINGS: Mapping[str, Rounding] = {"int8": int8, "int4": int4, "fp8": fp8}
"""By value of the setting."""


def parts_of(matrix: Tensor) -> Iterator[slice]:
    """Ranges of rows with about PART elements each; all rows on a GPU."""
    rows = max(1, PART // matrix.shape[1]) if matrix.device.type == "cpu" else max(1, len(matrix))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def without_zeros(scales: Tensor) -> Tensor:
    """Rows or groups of zeros get the scale 1, to avoid a division by zero."""
    return torch.where(scales == 0, 1.0, scales)

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
FITS = 2
"""Times that the scales of int4 are fitted to its codes. More gain little."""
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


def int4(matrix: Tensor, group: int = GROUP) -> Stored:
    """A scale and an integer zero per row and group of columns. 0 stays 0. The number of columns must be even."""
    rows, columns = matrix.shape
    shape = rows, -(-columns // group)
    scales, zeros = (matrix.new_empty(shape, dtype=torch.float32) for _ in range(2))
    codes = matrix.new_empty((*shape, group), dtype=torch.uint8)
    for part in parts_of(matrix):
        groups = F.pad(matrix[part].float(), (0, -columns % group)).view(-1, *codes.shape[1:])
        scales[part], zeros[part], codes[part] = _four_bits(groups)
    return Stored("u4", pack_pairs(codes.view(rows, -1)[:, :columns]), scales, zeros, group)


def _four_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """groups [..., values] -> scales [...], zeros [...], codes [..., values]."""
    lowest, highest = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    scales = without_zeros((highest - lowest) / INT4_MAX)
    zeros = (-lowest / scales).round_().clamp_(0, INT4_MAX)

    def signed(scales: Tensor) -> Tensor:
        """Codes less their zeros."""
        return (groups / scales).round_().clamp_(-zeros, INT4_MAX - zeros)

    for _ in range(FITS):
        # The scale with the smallest squared error for these codes, which in turn are the nearest to the last scale. It
        # is smaller than the range: the ends of a group are clamped, and its many values between them are closer.
        codes = signed(scales)
        scales = without_zeros((groups * codes).sum(-1, keepdim=True) / without_zeros((codes * codes).sum(-1, True)))
    # Scales in bfloat16 take half the memory.
    scales = without_zeros(scales.bfloat16().float())
    return scales.squeeze(-1), zeros.squeeze(-1), signed(scales).add_(zeros)


Rounding = Callable[[Tensor], Stored]
ROUNDINGS: Mapping[str, Rounding] = {"int8": int8, "int4": int4, "fp8": fp8}
"""By value of the setting."""
NAMES: Mapping[str, str] = {"none": "none", "int8": "int8", "int4": "int4 in groups of 32", "fp8": "fp8"}
"""What the settings compute, as part of an engine's `dtype`. Another rounding must have another name: engines continue
each other's streams if their names are equal."""


def parts_of(matrix: Tensor) -> Iterator[slice]:
    """Ranges of rows with about PART elements each; all rows on a GPU."""
    rows = max(1, PART // matrix.shape[1]) if matrix.device.type == "cpu" else max(1, len(matrix))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def without_zeros(scales: Tensor) -> Tensor:
    """Rows or groups of zeros get the scale 1, to avoid a division by zero."""
    return torch.where(scales == 0, 1.0, scales)

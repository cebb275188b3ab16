"""Linear maps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACK_ROWS = 16
"""Rows that the packed form is tuned for. It serves any number, and gives a row the same bits in a batch of any size.
"""


class Linear(nn.Module):
    """y = x Wᵀ + b.

    In float32 on a CPU with MKL, `freeze` packs the weight once into MKL's own layout (cblas_sgemm_pack). A plain
    matrix product packs it anew on every call, which at 4 to 32 rows costs more than the product itself.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight: Tensor = parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias: Tensor | None = parameter(outputs, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None
        self._shape: Tensor | None = None

    def freeze(self) -> None:
        """The weight is final. Where it is packed the plain one is given up."""
        if not _packable(self.weight):
            return
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.detach(), PACK_ROWS)
        # Beside a packed weight the op reads only the sizes of the plain one.
        self._shape = torch.empty(1).expand(self.weight.shape)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self.bias, x.shape[0])
        return out


class FusedLinear(Linear):
    """Several linear maps of the same input as one: their outputs side by side."""

    def __init__(
        self, inputs: int, parts: dict[str, int], *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = parts
        """Name of each map in a checkpoint, and its outputs."""


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unfilled weight."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _packable(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )

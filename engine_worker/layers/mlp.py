"""The feed-forward half of a layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.layer import Layer
from engine_worker.layers.linear import FusedLinear, SummedLinear
from engine_worker.layers.shard import ALONE, Shard


class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        """Raises ValueError where the ranks cannot share `intermediate_size`."""
        inside = shard.part(intermediate_size, "intermediate_size")
        self.gate_up_proj = FusedLinear(
            hidden_size, {"gate_proj": inside, "up_proj": inside}, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = SummedLinear(inside, hidden_size, bias=bias, dtype=dtype, device=device, shard=shard)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up_proj(x)
        return self.down_proj(gated(gate_up) if self._kernels is None else self._kernels.gate(gate_up))


def gated(gate_up: Tensor) -> Tensor:
    """[T, 2 * size] -> [T, size], by torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

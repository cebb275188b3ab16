"""The feed-forward block of a decoder layer."""

import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.adapters import LayerAdapters
from engine_worker.layers.layer import Layer
from engine_worker.layers.linear import FusedLinear, SummedLinear
from engine_worker.layers.shard import Place


class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202): [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, place: Place, *, bias: bool) -> None:
        """Raises ValueError if the number of ranks does not divide `intermediate_size`."""
        span = place.shard.span(intermediate_size, "intermediate_size")
        self.gate_up_proj = FusedLinear(hidden_size, {"gate_proj": span, "up_proj": span}, place, bias=bias)
        self.down_proj = SummedLinear(span, hidden_size, place, bias=bias)

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        gate_up = self.gate_up_proj(x)
        if adapters is not None:
            adapters.add("gate_up_proj", x, gate_up)
        gated = silu_and_mul(gate_up) if self._kernels is None else self._kernels.gate(gate_up)
        share = self.down_proj.share(gated)
        if adapters is not None:
            adapters.add("down_proj", gated, share)
        return self.down_proj.sum(share)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * size], gates before values -> silu(gates) * values, [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

"""RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.layer import Layer
from engine_worker.layers.shard import Place


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467): [T, size] -> [T, size]."""

    def __init__(self, size: int, eps: float, place: Place) -> None:
        self.weight = place.empty(size)
        self._eps = eps
        self._normalize = Normalize(size, eps, place.device)

    def freeze(self) -> None:
        self._normalize.set_weight(self.weight)

    def __call__(self, x: Tensor, update: Tensor | None = None) -> Tensor:
        """If given, `update` (the residual connection) is first added to x, in place."""
        if self._kernels is not None:
            return self._kernels.norm(x, update, self.weight, self._eps)
        if update is not None:
            x += update
        return self._normalize(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's RMSNorm: x [..., size], weight [..., size] -> [..., size]."""
    return F.rms_norm(x, weight.shape[-1:], eps=eps) * weight


class Normalize:
    """RMSNorm of [..., size] with a weight that broadcasts to it, by the fastest operations for the device."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self._size = size
        self._eps = eps
        self._root = torch.full((1,), (size * eps) ** 0.5, device=device)
        self._weight = torch.ones(size, device=device)
        self._fused = True

    def set_weight(self, weight: Tensor) -> None:
        # On a CPU torch's rms_norm runs ten small operations; x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight) runs four.
        self._fused = weight.dtype != torch.float32 or weight.device.type != "cpu"
        self._weight = weight if self._fused else weight * self._size**0.5

    def __call__(self, x: Tensor) -> Tensor:
        if self._fused:
            return rms_norm(x, self._weight, self._eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(norm, self._root)).mul_(self._weight)

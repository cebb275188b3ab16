"""RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_worker.layers.linear import parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight: Tensor = parameter(size, dtype=dtype, device=device)
        self._eps = eps
        self._eps_tensor = torch.full((1,), eps, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape."""
        return self.scaled(x, self.weight)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """By another weight, of any shape that broadcasts to x."""
        size = x.shape[-1]
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, (size,), eps=self._eps) * weight
        # On a CPU torch's rms_norm is a chain of ten small ops; this is half of them.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._eps_tensor, norm, norm, value=1 / size).rsqrt_()).mul_(weight)

"""The Muon optimizer in float32: `torch.optim.Muon` iterates in bfloat16, which most CPUs only emulate."""

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, for the weight matrices [out, in] of hidden layers.

    Keller Jordan et al., https://kellerjordan.github.io/posts/muon/. The update is scaled to AdamW's as in Liu et al.,
    "Muon is Scalable for LLM Training", arXiv 2502.16982, so that both optimizers share a learning rate.
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        matrices = sorted(matrices, key=lambda weight: tuple(weight.shape))
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            # Matrices of the same shape are orthogonalized as one batch.
            for shape, same_shape in groupby(group["params"], key=lambda weight: weight.shape):
                weights = list(same_shape)
                updates = _orthogonal(torch.stack([self._momentum(weight, group["momentum"]) for weight in weights]))
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-0.2 * max(shape) ** 0.5 * group["lr"])

    def _momentum(self, weight: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum as a moving average."""
        gradient = weight.grad
        if gradient is None:
            raise ValueError(f"matrix of shape {tuple(weight.shape)} has no gradient")
        average: Tensor = self.state[weight].setdefault("average", torch.zeros_like(weight))
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Approximate nearest semi-orthogonal matrices of [count, rows, columns]: quintic Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT.contiguous() if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x

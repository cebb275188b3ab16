"""What the device can do."""

import torch

from bench.gpu.findings import Rates
from bench.gpu.timing import fastest

ROUNDS, REPEATS = 5, 4


def rates(device: torch.device, dtype: torch.dtype, copied: int, side: int) -> Rates:
    """A copy of so many bytes, and a product of two square matrices."""
    return Rates(2 * copied / _copy(device, copied), 2 * side**3 / _product(device, dtype, side))


def _copy(device: torch.device, size: int) -> float:
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return fastest(device, lambda: target.copy_(source), ROUNDS, REPEATS)


def _product(device: torch.device, dtype: torch.dtype, side: int) -> float:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return fastest(device, lambda: left @ right, ROUNDS, REPEATS)

"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split form of Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by a factor, high frequencies unchanged, frequencies in between interpolated
    (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling of the frequencies."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None
    sections: tuple[int, int, int] | None = None
    """M-RoPE (arXiv:2409.12191): numbers of frequencies that rotate by a token's time, line and column. None: a token
    has one position."""

    def axes(self) -> list[int]:
        """For each frequency, the index of the position (time, line or column) that it rotates by."""
        return [axis for axis, count in enumerate(self.sections or ()) for _ in range(count)]


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling(factor, low, high, original):
            # 1 where at least `high` wavelengths fit into the original context, 0 where at most `low` do.
            unscaled = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
            return (1 - unscaled) * plain / factor + unscaled * plain


class Rotary:
    """Computes the rotations of a step's positions, once for all layers."""

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        half = frequencies(rope, head_dim)
        self._frequencies = torch.cat((half, half)).to(device)
        # The sign of the sine is applied here, so that `rotate` needs no negation: (a, b) -> (a cos - b sin, ...).
        self._signs = torch.cat((-torch.ones_like(half), torch.ones_like(half))).to(device)
        self._axes = torch.tensor(rope.axes() * 2, dtype=torch.int64, device=device)
        self._dtype = dtype

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [T], or [3, T] with M-RoPE -> cosines and signed sines, each [T, 1, head_dim]."""
        # Angles are float32: bfloat16 cannot represent all positions above 256.
        if positions.dim() == 1:
            angles = torch.outer(positions.float(), self._frequencies).unsqueeze(1)
        else:
            by_frequency = positions.float().index_select(0, self._axes)
            angles = (by_frequency.T * self._frequencies).unsqueeze(1)
        return angles.cos().to(self._dtype), (angles.sin() * self._signs).to(self._dtype)


def rotate(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, heads, head_dim] -> rotated x, the same shape."""
    cos, sin = rotations
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

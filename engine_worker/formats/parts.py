"""The tensors of a quantized matrix, by the ends of their names in a safetensors file.

All functions raise CheckpointError, whose message continues the name of the module.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sluice.checkpoint.errors import CheckpointError

Parts = Mapping[str, Tensor]


def part_of(parts: Parts, name: str) -> Tensor:
    if name not in parts:
        raise CheckpointError(f"has no {name}, which its other parts need ({', '.join(sorted(parts))})")
    return parts[name]


def shaped(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"has a {name} of shape {list(tensor.shape)}, must be {list(shape)}")
    return tensor


def typed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        raise CheckpointError(f"has a {name} of type {tensor.dtype}, must be {dtype}")
    return tensor


def matrix(name: str, tensor: Tensor) -> Tensor:
    """With two dimensions, neither of which is 0."""
    if tensor.dim() != 2 or not tensor.numel():
        raise CheckpointError(f"has a {name} of shape {list(tensor.shape)}, must have two dimensions")
    return tensor


def numbers_of(parts: Parts, name: str) -> Tensor:
    """float32."""
    numbers = part_of(parts, name)
    if not numbers.is_floating_point():
        raise CheckpointError(f"has a {name} of type {numbers.dtype}, must be floating-point numbers")
    return numbers.float()


def number_of(parts: Parts, name: str) -> Tensor:
    """A single number, float32."""
    numbers = numbers_of(parts, name)
    if numbers.numel() != 1:
        raise CheckpointError(f"has a {name} of shape {list(numbers.shape)}, must be one number")
    return numbers.reshape(())

"""The tensors of a quantized matrix, by the ends of their names in a safetensors file."""

from collections.abc import Mapping

from torch import Tensor

from sluice.checkpoint.errors import CheckpointError

Parts = Mapping[str, Tensor]


def part_of(parts: Parts, name: str) -> Tensor:
    """Raises CheckpointError."""
    if name not in parts:
        raise CheckpointError(f"has no {name}, which its other parts need ({', '.join(sorted(parts))})")
    return parts[name]


def shaped(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Raises CheckpointError if it has another shape."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"has a {name} of shape {list(tensor.shape)}, must be {list(shape)}")
    return tensor

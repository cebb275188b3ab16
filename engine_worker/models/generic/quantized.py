"""The weights of a quantized checkpoint for a module of transformers: all matrices are decoded."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engine_worker.formats.source import Files, find_weights
from engine_worker.formats.weight import Weight
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.quantization import Quantization

MATRICES = (nn.Linear, nn.Embedding)
"""Modules whose weights are [outputs, inputs] matrices, as formats describe them. Others, such as GPT-2's, may be
transposed."""


def matrix_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices that may be quantized, by the names of their weights."""
    parts = ((name, part.weight) for name, part in module.named_modules() if isinstance(part, MATRICES))
    return {f"{name}.weight": (weight.shape[0], weight.shape[1]) for name, weight in parts}


def decoded(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    quantization: Quantization,
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """All weights on the host, by the names that the checkpoint gives them.

    `shapes`: from `matrix_shapes`. `progress` is called with the bytes read. Raises CheckpointError.
    """
    weights = find_weights(folder)
    for name, weight in weights.items():
        _check(name, weight, shapes)
    done, state = 0, dict[str, Tensor]()
    with Files("cpu") as files:
        for name, weight in weights.items():
            if weight.whole is None:
                state[name] = files.stored(name, weight, shapes[name], quantization).decode().to(dtype)
            else:
                state[name] = files.plain(weight.whole, ())
            progress(done := done + sum(place.num_bytes for place in weight.places))
    return state


def _check(name: str, weight: Weight, shapes: Mapping[str, tuple[int, int]]) -> None:
    if weight.whole is None and name not in shapes:
        raise CheckpointError(
            f"{name} is quantized, but in transformers' module it is no matrix of that name: quantized models that run "
            "through transformers must have all quantized matrices under the names that its modules have"
        )

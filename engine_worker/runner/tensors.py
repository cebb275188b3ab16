"""The tensors that requests may ask for: logits, hidden states, and what functions of the operator make of them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_worker.runner.forward import Forward, Layers
from engine_worker.step import LOGITS
from sluice.ring.names import find
from sluice.ring.tensors import BYTES, HIDDEN_STATES, LAYER_PREFIX, PART_BYTES

TensorFunction = Callable[[Tensor, Tensor], Tensor]
"""(hidden states [N, hidden] as the head gets them, logits [N, vocab] float32) -> [N, ...]. Must not change them."""
RowsFunction = Callable[[Tensor, Tensor, Layers], Tensor]
"""The same, also of the output layers."""
LARGEST_ROW = 8 * PART_BYTES
"""Bytes; one message has at least one row."""
TRIED_ROWS = 2


def _logits(_: Tensor, logits: Tensor, _layers: Layers) -> Tensor:
    return logits


def _hidden(hidden: Tensor, _: Tensor, _layers: Layers) -> Tensor:
    return hidden


def _layer(index: int) -> RowsFunction:
    return lambda _hidden, _logits, layers: layers[index]


def _of_operator(function: TensorFunction) -> RowsFunction:
    return lambda hidden, logits, _layers: function(hidden, logits)


class OutputTensors(NamedTuple):
    functions: Mapping[str, RowsFunction]
    row_bytes: Mapping[str, int]

    @classmethod
    def of(cls, forward: Forward[Any, Any], names: Mapping[str, str]) -> "OutputTensors":
        """`names`: functions as module:function, by the name of their tensor. Each is called once, with zeros. Raises
        ValueError on one that cannot be used."""
        functions: dict[str, RowsFunction] = {LOGITS: _logits, HIDDEN_STATES: _hidden}
        functions |= {f"{LAYER_PREFIX}{layer}": _layer(layer) for layer in forward.output_layers}
        functions |= {name: _of_operator(_find(name, value)) for name, value in names.items()}
        hidden = torch.zeros(TRIED_ROWS, forward.hidden_size, dtype=forward.hidden_dtype, device=forward.device)
        logits = torch.zeros(TRIED_ROWS, forward.vocab_size, device=forward.device)
        layers = dict.fromkeys(forward.output_layers, hidden)
        return cls(
            functions, {name: _row_bytes(name, each, hidden, logits, layers) for name, each in functions.items()}
        )


def _find(name: str, value: str) -> TensorFunction:
    try:
        found: TensorFunction = find(value)
    except ValueError as error:
        raise ValueError(f"output_tensors: {name}: {value!r} cannot be used: {error}") from error
    if not callable(found):
        raise ValueError(f"output_tensors: {name}: {value!r} cannot be used: it is not callable")
    return found


def _row_bytes(name: str, function: RowsFunction, hidden: Tensor, logits: Tensor, layers: Layers) -> int:
    try:
        found = function(hidden, logits, layers)
    except Exception as error:
        raise ValueError(f"output_tensors: {name}: the function failed in a test: {error}") from error
    if not isinstance(found, Tensor) or found.dim() < 1 or len(found) != len(hidden):
        raise ValueError(f"output_tensors: {name}: the function must return a tensor with a row per position")
    dtype = str(found.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise ValueError(f"output_tensors: {name} has the dtype {dtype}, must be one of {', '.join(BYTES)}")
    size = found[0].numel() * BYTES[dtype]
    if not 0 < size <= LARGEST_ROW:
        raise ValueError(f"output_tensors: {name} has {size} bytes per position, must have 1 to {LARGEST_ROW}")
    return size

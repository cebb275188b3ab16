"""The tensors that requests can ask for: logits, hidden states, output layers, and results of operators' functions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_worker.runner.forward import Forward, Layers
from engine_worker.step import LOGITS
from sluice.settings.names import find_function
from sluice.wire.tensors import BYTES, HIDDEN_STATES, LAYER_PREFIX, PART_BYTES

TensorFunction = Callable[[Tensor, Tensor], Tensor]
"""(hidden states [N, hidden], the input of the head; logits [N, vocab] float32) -> [N, ...]. Must not modify its
arguments."""
RowsFunction = Callable[[Tensor, Tensor, Layers], Tensor]
"""A `TensorFunction` that also gets the output layers."""
LARGEST_ROW = 8 * PART_BYTES
"""Maximum number of bytes per row; a message has at least one row."""
TEST_ROWS = 2
"""Rows in the test call of each function."""


def _logits(_: Tensor, logits: Tensor, _layers: Layers) -> Tensor:
    return logits


def _hidden(hidden: Tensor, _: Tensor, _layers: Layers) -> Tensor:
    return hidden


def _layer(index: int) -> RowsFunction:
    return lambda _hidden, _logits, layers: layers[index]


def _without_layers(name: str, function: TensorFunction) -> RowsFunction:
    def rows(hidden: Tensor, logits: Tensor, _: Layers) -> Tensor:
        try:
            return function(hidden, logits)
        except Exception:
            raise
        except BaseException as error:
            # A sys.exit would end the engine instead of this step.
            raise RuntimeError(f"the function of the tensor {name} raised {type(error).__name__}: {error}") from error

    return rows


class OutputTensors(NamedTuple):
    functions: Mapping[str, RowsFunction]
    row_bytes: Mapping[str, int]

    @classmethod
    def of(cls, forward: Forward[Any, Any], names: Mapping[str, str]) -> "OutputTensors":
        """`names`: functions as module:function, by the name of their tensor. Each is called once with zeros. Raises
        ValueError if one cannot be used."""
        functions: dict[str, RowsFunction] = {LOGITS: _logits, HIDDEN_STATES: _hidden}
        functions |= {f"{LAYER_PREFIX}{layer}": _layer(layer) for layer in forward.output_layers}
        functions |= {
            name: _without_layers(name, find_function(f"output_tensors: {name}", value))
            for name, value in names.items()
        }
        hidden = torch.zeros(TEST_ROWS, forward.hidden_size, dtype=forward.hidden_dtype, device=forward.device)
        logits = torch.zeros(TEST_ROWS, forward.vocab_size, device=forward.device)
        layers = dict.fromkeys(forward.output_layers, hidden)
        row_bytes = {name: _row_bytes(name, function, hidden, logits, layers) for name, function in functions.items()}
        return cls(functions, row_bytes)


def _row_bytes(name: str, function: RowsFunction, hidden: Tensor, logits: Tensor, layers: Layers) -> int:
    """Bytes of one row, by a test call. Raises ValueError if the result cannot be sent."""
    try:
        rows = function(hidden, logits, layers)
    except Exception as error:
        raise ValueError(f"output_tensors: {name}: the function failed in a test: {error}") from error
    if not isinstance(rows, Tensor) or rows.dim() < 1 or len(rows) != len(hidden):
        raise ValueError(f"output_tensors: {name}: the function must return a tensor with a row per position")
    dtype = str(rows.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise ValueError(f"output_tensors: {name} has the dtype {dtype}, must be one of {', '.join(BYTES)}")
    size = rows[0].numel() * BYTES[dtype]
    if not 0 < size <= LARGEST_ROW:
        raise ValueError(f"output_tensors: {name} has {size} bytes per position, must have 1 to {LARGEST_ROW}")
    return size

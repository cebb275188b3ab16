"""Tensor rows whose values are their own row numbers."""

import numpy as np

from sluice.wire.tensors import TensorRows


def tensor_rows(
    start: int, end: int, name: str = "hidden_states", *, sequence: int = 0, context: bool = False, width: int = 2
) -> TensorRows:
    """Rows `start` to `end` - 1. All `width` values of row i are i."""
    values = np.repeat(np.arange(start, end, dtype=np.float32), width)
    return TensorRows(
        1, 0, sequence, name, context, start, (end - start, width), "float32", memoryview(values.tobytes())
    )


def first_values(parts: list[TensorRows]) -> list[int]:
    """The row numbers in these parts."""
    return [int(row[0]) for part in parts for row in np.frombuffer(part.data, np.float32).reshape(part.shape).tolist()]

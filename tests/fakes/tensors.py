"""Rows of tensors with values that say which rows they are."""

import numpy as np

from sluice.ring.tensors import TensorRows


def tensor_rows(
    start: int, end: int, name: str = "hidden_states", *, sequence: int = 0, context: bool = False, width: int = 2
) -> TensorRows:
    """Row i is `width` times i."""
    values = np.repeat(np.arange(start, end, dtype=np.float32), width)
    return TensorRows(
        1, 0, sequence, name, context, start, (end - start, width), "float32", memoryview(values.tobytes())
    )


def first_values(parts: list[TensorRows]) -> list[int]:
    """The rows in these parts."""
    return [int(row[0]) for part in parts for row in np.frombuffer(part.data, np.float32).reshape(part.shape).tolist()]

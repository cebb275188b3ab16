"""Compares the tensors of two streams."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from sluice.client import Tensor

Key = tuple[int, str, bool]
"""Index of the output, name of the tensor, whether the rows belong to the prompt."""
COLUMNS = 64
"""Number of columns stored of each row, because logits of the whole vocabulary would fill the memory."""
NEARLY = 2e-2
"""Tolerance of logits, since the order of sums depends on the batch."""


def join(tensors: Iterable[Tensor], faults: list[str]) -> dict[Key, NDArray[np.float32]]:
    """The first columns of all rows. Appends to `faults` if rows are missing or arrived twice."""
    found: dict[Key, list[NDArray[np.float32]]] = {}
    for each in tensors:
        parts = found.setdefault((each.index, each.name, each.context), [])
        if each.start != (known := sum(map(len, parts))):
            faults.append(f"tensor {each.name}: row {each.start} after {known} rows")
        parts.append(each.array()[:, :COLUMNS].copy())
    return {key: np.concatenate(parts) for key, parts in found.items()}


def difference(found: Mapping[Key, NDArray[np.float32]], truth: Mapping[Key, NDArray[np.float32]]) -> str:
    """Describes the difference. Empty if they are equal."""
    if found.keys() != truth.keys():
        return f"tensors {sorted(found)} instead of {sorted(truth)}"
    for key, right in truth.items():
        if found[key].shape != right.shape:
            return f"tensor {key}: shape {found[key].shape} instead of {right.shape}"
        if not np.allclose(found[key], right, atol=NEARLY):
            return f"tensor {key} differs by up to {np.abs(found[key] - right).max()}"
    return ""

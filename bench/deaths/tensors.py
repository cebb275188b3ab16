"""The tensors that a stream brought, compared with those of another."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from sluice.client import Tensor

Key = tuple[int, str, bool]
"""The output, the tensor's name, whether its rows are the prompt's."""
COLUMNS = 64
"""Of each row: logits of a vocabulary would fill the memory."""
NEARLY = 2e-2
"""Logits may differ by this: batches of other sequences sum in another order."""


def join(tensors: Iterable[Tensor], faults: list[str]) -> dict[Key, NDArray[np.float32]]:
    """The first columns of all rows; adds to the faults if rows are missing or came twice."""
    found: dict[Key, list[NDArray[np.float32]]] = {}
    for each in tensors:
        parts = found.setdefault((each.index, each.name, each.context), [])
        if each.start != (known := sum(map(len, parts))):
            faults.append(f"tensor {each.name}: row {each.start} after {known} rows")
        parts.append(each.array()[:, :COLUMNS].copy())
    return {key: np.concatenate(parts) for key, parts in found.items()}


def difference(found: Mapping[Key, NDArray[np.float32]], truth: Mapping[Key, NDArray[np.float32]]) -> str:
    """In words; empty if equal."""
    if found.keys() != truth.keys():
        return f"tensors {sorted(found)} for {sorted(truth)}"
    for key, right in truth.items():
        if found[key].shape != right.shape:
            return f"tensor {key}: shape {found[key].shape} for {right.shape}"
        if not np.allclose(found[key], right, atol=NEARLY):
            return f"tensor {key} differs by up to {np.abs(found[key] - right).max()}"
    return ""

"""The largest logits of each row, on a CPU without sorting the vocabulary."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 16
"""Tokens in a group."""
MOST_GROUPS = 4
"""Times as many groups as tokens are wanted. More reach the bound where many logits are equal."""
LOW = 0xFFFFFFFF
"""The lower half of a key."""


def largest(logits: Tensor, most: int) -> Tensor:
    """As the indices of topk: [N, vocab] float32 -> [N, most] int64, on a CPU the lowest first among equals."""
    on_cpu = logits.device.type == "cpu" and logits.shape[1] % GROUP == 0 and most * GROUP <= logits.shape[1]
    found = _by_bounds(logits, most) if on_cpu else None
    return logits.topk(most, dim=1).indices if found is None else torch.from_numpy(found)


def _by_bounds(logits: Tensor, most: int) -> NDArray[np.int64] | None:
    """A third of topk's time. None: it would take longer, or a row has NaNs.

    The `most` largest of a row reach the `most`-th largest of its group maxima, and few others do.
    """
    count, vocab = logits.shape
    stride = vocab // GROUP
    maxima = logits.view(count, GROUP, stride).amax(dim=1).numpy()
    bounds = np.partition(maxima, -most, axis=1)[:, -most, None]
    groups = np.flatnonzero(maxima >= bounds)
    if len(groups) > MOST_GROUPS * most * count:
        return None
    rows = groups // stride
    members = (rows * vocab + groups % stride)[:, None] + np.arange(0, vocab, stride)
    values = logits.numpy().ravel().take(members)
    reach = np.flatnonzero(values >= bounds[rows])
    rows, found = rows[reach // GROUP], members.ravel()[reach]
    counts = np.bincount(rows, minlength=count)
    if counts.min() < most:
        return None
    keys = np.full((count, counts.max()), np.iinfo(np.int64).min)
    columns = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    keys[rows, columns] = _keys(values.ravel()[reach], found - rows * vocab)
    keys.sort(axis=1)
    ids: NDArray[np.int64] = LOW - (keys[:, : -most - 1 : -1] & LOW)
    return ids


def _keys(values: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """In the order of the values, and of falling ids among equals."""
    bits = values.view(np.int32)
    # As integers, floats below zero have the opposite order.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32 | (LOW - ids)

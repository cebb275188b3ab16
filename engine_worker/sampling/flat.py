"""Flat indices: positions in scores [N, size] in row-major order."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def flat_index(rows: Sequence[int], ids: Sequence[NDArray[np.int64]], size: int) -> Tensor:
    """Flat indices [C] int64 of the token ids `ids[i]` in row `rows[i]`, for all i."""
    starts = np.repeat(np.array(rows, np.int64) * size, [len(each) for each in ids])
    return torch.from_numpy(starts + np.concatenate(ids))


def gather_flat(scores: Tensor, flat_index: Tensor) -> Tensor:
    """Scores [N, size] at flat_index [C] int64 -> [C]."""
    return scores.view(-1).index_select(0, flat_index)


def scatter_flat(scores: Tensor, flat_index: Tensor, values: Tensor) -> None:
    """Write values [C] into scores, in place."""
    scores.view(-1).index_copy_(0, flat_index, values)

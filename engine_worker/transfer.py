"""Arrays on their way to a device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 16
"""Bytes: where an array may begin in the buffer that all travel in."""

DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "bool")}


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The same numbers as tensors. On a CPU they share the arrays' memory; to CUDA all travel in one copy, which nobody
    waits for: work that is queued on the same stream later finds them there."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = list(accumulate((-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays), initial=0))
    # Pinned memory comes from torch's cache, which hands it out again once the copy is through.
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=False):
        host.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]

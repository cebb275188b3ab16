"""Arrays on their way to a device."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 16
"""Bytes: where an array may begin in the buffer that all travel in."""

Tree = TypeVar("Tree", bound=tuple[Any, ...])

DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "bool")}


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The same numbers as tensors. On a CPU they share the arrays' memory; to CUDA all travel in one copy, which nobody
    waits for: work that is queued on the same stream later finds them there."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not arrays:
        return []
    # Pinned memory comes from torch's cache, which hands it out again once the copy is through.
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[NDArray[Any]], *, pinned: bool = False) -> Tensor:
    """[bytes] uint8 of all of them, one after the other."""
    starts = _starts(arrays)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    for array, start in zip(arrays, starts, strict=False):
        buffer.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """What `pack` made of arrays like these, wherever it is now, as tensors that share its memory."""
    return [
        buffer[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return list(accumulate((-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays), initial=0))


def send(tree: Tree, device: torch.device) -> Tree:
    """A tree of tuples, with its tensors on the device; they go as those of `to_device` do."""
    if device.type == "cpu":
        return tree
    sent = iter(to_device([tensor.numpy() for tensor in _tensors(tree)], device))
    found: Tree = _with(tree, sent)
    return found


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _tensors(part)


def _with(tree: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return next(tensors)
    if not isinstance(tree, tuple):
        return tree
    parts = [_with(part, tensors) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)

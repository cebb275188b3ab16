"""From the host to a device, in one copy: a step's arrays, and sampling plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.inputs import AttentionInputs
from engine_worker.runner.batch import StepArrays

ALIGNED = 16
"""Bytes: alignment of each array in the shared buffer."""

Tree = TypeVar("Tree", bound=tuple[Any, ...])

DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "bool")}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """`StepArrays` on a device."""

    token_ids: Tensor
    """[T] int64. Complete only after `follow`."""
    positions: Tensor
    """[T] int64."""
    attention: AttentionInputs
    last_tokens: Tensor | None
    """[R] int64; None: all T."""
    follow_tokens: Tensor
    follow_draws: Tensor
    """Each [F] int64."""

    @classmethod
    def of(cls, arrays: StepArrays, device: torch.device) -> "StepTensors":
        parts: list[NDArray[Any]] = [
            arrays.token_ids,
            arrays.positions,
            arrays.slots,
            arrays.block_tables,
            arrays.query_start,
            arrays.context_lengths,
            arrays.follow_tokens,
            arrays.follow_draws,
        ]
        rows = [] if arrays.last_tokens is None else [arrays.last_tokens]
        token_ids, positions, slots, tables, query_start, lengths, tokens, draws, *last = arrays_to_device(
            parts + rows, device
        )
        attention = AttentionInputs(
            slots, tables, query_start, lengths, arrays.generation_rows, arrays.max_query, arrays.max_context
        )
        return cls(token_ids, positions, attention, last[0] if last else None, tokens, draws)

    def follow(self, sampled: Tensor) -> None:
        """Fill in the tokens that the previous step drew: `sampled` [D] int64."""
        if len(self.follow_tokens):
            self.token_ids.index_copy_(0, self.follow_tokens, sampled.index_select(0, self.follow_draws))


def to_device(tree: Tree, device: torch.device) -> Tree:
    """A tree of (named) tuples, with its CPU tensors copied to the device as by `arrays_to_device`."""
    if device.type == "cpu":
        return tree
    sent = iter(arrays_to_device([tensor.numpy() for tensor in _tensors(tree)], device))
    found: Tree = _with(tree, sent)
    return found


def arrays_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors. On a CPU they share the arrays' memory; to CUDA they travel in one asynchronous copy,
    which work queued later on the same stream waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not arrays:
        return []
    # Dropping the pinned buffer here is safe: torch's allocator reuses it only after the copy is done.
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[NDArray[Any]], *, pinned: bool = False) -> Tensor:
    """All arrays in one buffer: [bytes] uint8."""
    starts = _starts(arrays)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    for array, start in zip(arrays, starts, strict=False):
        buffer.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Views of a packed buffer, on any device, with the dtypes and shapes of `arrays`."""
    return [
        buffer[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return list(accumulate((-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays), initial=0))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _tensors(part)


def _with(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with its tensors replaced, in order."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if not isinstance(tree, tuple):
        return tree
    parts = [_with(part, tensors) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)

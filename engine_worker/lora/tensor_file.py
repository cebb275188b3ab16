"""Reads the tensors of a safetensors file in memory, copying them without the GIL.

`safetensors.deserialize` holds the GIL while it copies a whole file, half a second per GiB, which would delay the
engine's steps.
"""

from collections.abc import Mapping
from math import prod
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from sluice.checkpoint.tensor_file import TensorFileError, decode, split
from sluice.wire.adapters import Data

MAX_HEADER_BYTES = 8 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]
    """First byte and end (exclusive), counted from the end of the header."""


def read_matrices(data: Data) -> dict[str, Tensor]:
    """The tensors, by name. Raises TensorFileError, also if a tensor is not a matrix of a supported type."""
    file = split(data, MAX_HEADER_BYTES)
    entries = {name: decode(raw, _Entry) for name, raw in file.entries.items()}
    for name, entry in entries.items():
        _check(name, entry)
    _check_layout(entries, len(data) - file.start)
    return {name: _copied(entry, data, file.start) for name, entry in entries.items()}


def _check(name: str, entry: _Entry) -> None:
    """Raises TensorFileError."""
    dtype, (first, end) = DTYPES.get(entry.dtype), entry.data_offsets
    if dtype is None:
        raise TensorFileError(f"has tensor {shown(name)} of type {entry.dtype[:80]}; supported: {', '.join(DTYPES)}")
    if len(entry.shape) != 2 or not all(entry.shape):
        raise TensorFileError(f"has tensor {shown(name)} of shape {entry.shape}, which is not a matrix")
    if end - first != prod(entry.shape) * dtype.itemsize:
        raise _misplaced(name, entry)


def _check_layout(entries: Mapping[str, _Entry], size: int) -> None:
    """Raises TensorFileError unless the tensors fill `size` bytes, one after the other. If they could overlap, a small
    file could contain any number of large tensors."""
    previous_end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, end = entry.data_offsets
        if first != previous_end or end > size:
            raise _misplaced(name, entry)
        previous_end = end
    if previous_end != size:
        raise TensorFileError(
            f"is not a safetensors file: it has {size} bytes of tensors, but its header describes {previous_end}"
        )


def _copied(entry: _Entry, data: Data, start: int) -> Tensor:
    first, end = entry.data_offsets
    copied = np.frombuffer(data, np.uint8, end - first, start + first).copy()
    return torch.from_numpy(copied).view(DTYPES[entry.dtype]).view(entry.shape)


def _misplaced(name: str, entry: _Entry) -> TensorFileError:
    first, end = entry.data_offsets
    return TensorFileError(f"is not a safetensors file: it has tensor {shown(name)} at bytes {first} to {end}")


def shown(value: object) -> str:
    return repr(value)[:80]

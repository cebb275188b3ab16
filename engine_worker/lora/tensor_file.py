"""A safetensors file in memory -> its tensors, copied without the interpreter's lock.

`safetensors.deserialize` holds the lock while it copies a whole file, half a second per GiB, and the engine's steps
would wait for it.
"""

from math import prod
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from sluice.ring.adapters import Data
from sluice.ring.tensor_file import TensorFileError, decode, split

MAX_HEADER_BYTES = 8 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]
    """Behind the header: of the first byte, and of the one after the last."""


def read_matrices(data: Data) -> dict[str, Tensor]:
    """By name. Raises TensorFileError, also for a tensor that is not a matrix of a supported type."""
    file = split(data, MAX_HEADER_BYTES)
    return {name: _matrix(name, decode(raw, _Entry), data, file.start) for name, raw in file.entries.items()}


def _matrix(name: str, entry: _Entry, data: Data, start: int) -> Tensor:
    shown, dtype, (first, end) = repr(name)[:80], DTYPES.get(entry.dtype), entry.data_offsets
    if dtype is None:
        raise TensorFileError(f"has tensor {shown} of type {entry.dtype[:80]}; supported: {', '.join(DTYPES)}")
    if len(entry.shape) != 2 or not all(entry.shape):
        raise TensorFileError(f"has tensor {shown} of shape {entry.shape}, which is not that of a matrix")
    if end - first != prod(entry.shape) * dtype.itemsize or start + end > len(data):
        raise TensorFileError(f"is not a safetensors file: tensor {shown} lies at bytes {first} to {end}")
    copied = np.frombuffer(data, np.uint8, end - first, start + first).copy()
    return torch.from_numpy(copied).view(dtype).view(entry.shape)

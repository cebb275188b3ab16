"""A safetensors file in memory -> its tensors, copied without the interpreter's lock.

`safetensors.deserialize` holds the lock while it copies a whole file, half a second per GiB, and the engine's steps
would wait for it. Format: https://huggingface.co/docs/safetensors#format
"""

from collections.abc import Iterator
from math import prod
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from sluice.ring.adapters import Data

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 8 << 20
METADATA = "__metadata__"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]
    """Behind the header: of the first byte, and of the one after the last."""


class TensorFileError(ValueError):
    """Not such a file, or a tensor that is not a matrix of a supported type."""


def read_matrices(data: Data) -> dict[str, Tensor]:
    """By name. Raises TensorFileError."""
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + size
    if len(data) < LENGTH_BYTES or size > MAX_HEADER_BYTES or start > len(data):
        raise TensorFileError("is not a safetensors file")
    return {name: _matrix(name, entry, data, start) for name, entry in _entries(bytes(data[LENGTH_BYTES:start]))}


def _entries(header: bytes) -> Iterator[tuple[str, _Entry]]:
    try:
        for name, entry in msgspec.json.decode(header, type=dict[str, msgspec.Raw]).items():
            if name != METADATA:
                yield name, msgspec.json.decode(entry, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TensorFileError(f"is not a safetensors file: {error}") from error


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

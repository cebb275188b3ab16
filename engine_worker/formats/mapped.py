"""A checkpoint's file in memory: what is there as it is needed is not copied."""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from engine_worker.formats.weight import Place
from sluice.checkpoint.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""By name, in GGUF and safetensors files."""


class MappedFile:
    """Its pages are read when they are first touched, and stay in memory until `release`, or until no view is left."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            # Copied when written, which nobody does: torch has no tensors that are only read.
            self._pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = torch.frombuffer(self._pages, dtype=torch.uint8)

    def bytes_of(self, place: Place) -> Tensor:
        """[num_bytes] uint8, a view."""
        return self._data[place.start : place.start + place.num_bytes]

    def tensor(self, place: Place) -> Tensor:
        """A view, except of a tensor that begins at an address which its type cannot have. Raises CheckpointError."""
        if (dtype := DTYPES.get(place.type)) is None:
            raise CheckpointError(
                f"{place.name} has type {place.type}, which is not supported; the types {', '.join(DTYPES)} are"
            )
        raw = self.bytes_of(place)
        return (raw.clone() if place.start % dtype.itemsize else raw).view(dtype).view(place.shape)

    def holds(self, address: int) -> bool:
        return 0 <= address - self._data.data_ptr() < self._data.nbytes

    def release(self) -> None:
        """Drop its pages from memory. Those that are touched later are read again."""
        self._pages.madvise(mmap.MADV_DONTNEED)

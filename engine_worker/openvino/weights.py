"""Weight matrices as constants of the graph, float32 or quantized to int8 or int4, and who owns their memory: plain
memory, or a file mapped into memory.

The CPU plugin repacks the weights of each matrix product for its kernels, but keeps the original constants alive too.
In plain memory the weights therefore take twice their size. The originals in a mapped file can be dropped from memory
after packing; the kernel reads a page back if the plugin touches it. Codes of quantized matrices that the checkpoint's
own file has in the form of the graph need no other file.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as op
from torch import Tensor

from engine_worker.formats.mapped import MappedFile
from engine_worker.formats.packing import pack_pairs
from engine_worker.formats.rounding import SENSITIVE, int8, parts_of, without_zeros

INT4_MIN = -8
GROUP = 64
"""Consecutive inputs that share a scale in int4."""
LAYERS = "model.layers."
MIN_FILE_BYTES = 1 << 20
"""Smaller arrays stay in plain memory."""
MIN_FREE_DISK_BYTES = 1 << 30
"""Disk space that the file leaves free for other programs."""


class ConstantStore:
    """Constants in plain memory, except for views of the checkpoint's files."""

    def __init__(self, files: Mapping[Path, MappedFile] = {}) -> None:
        """`files`: those of the checkpoint that have been mapped; more may follow."""
        self._where = "in memory"
        self._files = files
        self._arrays: dict[int, NDArray[Any]] = {}
        """By the addresses of their memory, which no other array can have while they exist."""

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """Store an array; returns one with the same values, which stays valid while this store exists. What it returned
        before, in any shape, it returns as it is."""
        # OpenVINO does not hold a reference to every array whose memory its constants share.
        self._arrays.setdefault(array.ctypes.data, array)
        return array

    def release(self) -> None:
        """Call when the plugin has packed the weights: it rarely reads the originals afterwards."""
        for file in self._files.values():
            file.release()

    @property
    def summary(self) -> str:
        """Where the constants are, for the log."""
        also = any(map(self._is_in_checkpoint, self._arrays.values()))
        return f"{self._where}, and in the checkpoint's files" if also else self._where

    def _is_in_checkpoint(self, array: NDArray[Any]) -> bool:
        return any(file.holds(array.ctypes.data) for file in self._files.values())


class FileStore(ConstantStore):
    """Constants in an unnamed temporary file, mapped into memory. `release` drops their pages from memory; a page that
    is read later comes back from the file. If the file cannot be created, or the disk is nearly full, constants stay in
    plain memory, and `summary` says why."""

    def __init__(self, folder: Path, files: Mapping[Path, MappedFile] = {}) -> None:
        super().__init__(files)
        self._where = f"in a file in {folder}"
        self._maps: list[mmap.mmap] = []
        self._size = 0
        self._file: Any = None
        try:
            if not hasattr(os, "posix_fallocate"):
                raise OSError("this system has no posix_fallocate to reserve disk blocks")
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open while arrays are being added
        except OSError as error:
            self._fall_back(error)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        kept = array.ctypes.data in self._arrays or self._is_in_checkpoint(array)
        if self._file is not None and array.nbytes >= MIN_FILE_BYTES and not kept:
            try:
                array = self._write(array)
            except OSError as error:
                self._fall_back(error)
        return super().keep(array)

    def release(self) -> None:
        super().release()
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)

    def _write(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copy an array to the end of the file; returns the mapped copy. Raises OSError."""
        start, size = self._size, -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        disk = os.fstatvfs(self._file.fileno())
        if disk.f_bavail * disk.f_frsize < size + MIN_FREE_DISK_BYTES:
            raise OSError("the disk is nearly full")
        # Reserve the blocks first: writing to a sparse page on a full disk raises SIGBUS, which ends the process.
        os.posix_fallocate(self._file.fileno(), start, size)
        self._size += size
        pages = mmap.mmap(self._file.fileno(), size, offset=start)
        self._maps.append(pages)
        mapped = np.frombuffer(pages, array.dtype, array.size).reshape(array.shape)
        mapped[...] = array
        return mapped

    def _fall_back(self, error: OSError) -> None:
        """Leave this array and all later ones in plain memory."""
        self._file = None
        self._where = f"in memory: {self._where} failed: {error.strerror or error}"


def open_store(folder: str | None, files: Mapping[Path, MappedFile] = {}) -> ConstantStore:
    """The store for the setting `weights_folder`. `files`: see `ConstantStore`."""
    return ConstantStore(files) if folder is None else FileStore(Path(folder).expanduser(), files)


class Format(Protocol):
    """How the graph stores a weight matrix [outputs, inputs]."""

    def node(self, matrix: Tensor) -> ov.Node:
        """matrix float32 -> a node of the same shape that evaluates to float32."""

    def rounded(self, matrix: Tensor) -> Tensor:
        """The values that `node` evaluates to."""


@dataclass(frozen=True)
class Plain:
    """Not quantized: float32."""

    store: ConstantStore

    def node(self, matrix: Tensor) -> ov.Node:
        return _shared(self.store.keep(matrix.detach().numpy()))

    def rounded(self, matrix: Tensor) -> Tensor:
        return matrix


@dataclass(frozen=True)
class Int8:
    """Symmetric, one scale per output. OpenVINO quantizes the other operand of a product dynamically."""

    store: ConstantStore

    def node(self, matrix: Tensor) -> ov.Node:
        stored = int8(matrix)
        codes = _shared(self.store.keep(stored.codes.numpy()))
        return op.multiply(op.convert(codes, ov.Type.f32), constant(stored.scales))

    def rounded(self, matrix: Tensor) -> Tensor:
        return int8(matrix).decode()


@dataclass(frozen=True)
class Int4:
    """Symmetric, one scale per output and group of inputs. The plugin recognizes only this pattern of operations and
    otherwise expands the weights to more than 4 bits."""

    store: ConstantStore

    def node(self, matrix: Tensor) -> ov.Node:
        values, scales = quantize_groups(matrix)
        packed = ov.Tensor(self.store.keep(pack_pairs(values).numpy()), ov.Shape(list(values.shape)), ov.Type.i4)
        product = op.multiply(op.convert(op.constant(packed), ov.Type.f32), constant(scales))
        return op.reshape(product, op.constant(np.array(matrix.shape, np.int64)), False)

    def rounded(self, matrix: Tensor) -> Tensor:
        values, scales = quantize_groups(matrix)
        return (values * scales).view(matrix.shape)


class Weights(NamedTuple):
    """The formats of a decoder's matrices."""

    layers: Format
    sensitive: Format
    """Of the matrices SENSITIVE, whose errors change the output most: with int8 for these, int4 loses less than half
    (docs/operations.md)."""
    vocabulary: Plain | Int8
    """Format of the embedding and the head. Never int4: no later layer evens out their errors."""

    def of(self, name: str) -> Format:
        """name: of a weight in the checkpoint."""
        if not name.startswith(LAYERS):
            return self.vocabulary
        return self.sensitive if name.endswith(SENSITIVE) else self.layers


def formats(quantize: str, store: ConstantStore) -> Weights:
    """The formats for a value of the setting `quantize`."""
    plain, int8, int4 = Plain(store), Int8(store), Int4(store)
    return {
        "none": Weights(plain, plain, plain),
        "int8": Weights(int8, int8, int8),
        "int4": Weights(int4, int8, int8),
    }[quantize]


def constant(values: Tensor) -> ov.Node:
    """A constant that shares the tensor's memory."""
    return _shared(values.detach().numpy())


def rows_of(table: Plain | Int8, matrix: Tensor, ids: ov.Node) -> ov.Node:
    """Embedding lookup: ids [T] -> those rows of the matrix [T, inputs] float32."""
    axis = op.constant(np.int64(0))
    if isinstance(table, Plain):
        return op.gather(table.node(matrix), ids, axis)
    # Gather first, then dequantize: the plugin would otherwise keep the whole dequantized matrix.
    stored = int8(matrix)
    rows = op.gather(_shared(table.store.keep(stored.codes.numpy())), ids, axis)
    return op.multiply(op.convert(rows, ov.Type.f32), op.gather(constant(stored.scales), ids, axis))


def quantize_groups(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [N, K] float32 -> values [N, K / group, group] int8 from -8 to 7, scales [N, K / group, 1] float32. The
    group is GROUP, or a divisor of it where K is not a multiple of GROUP."""
    group = math.gcd(matrix.shape[1], GROUP)
    groups = matrix.reshape(len(matrix), -1, group)
    values, scales = torch.empty(groups.shape, dtype=torch.int8), torch.empty(*groups.shape[:2], 1)
    for part in parts_of(matrix):
        lowest, highest = groups[part].aminmax(dim=2, keepdim=True)
        # The element of the largest magnitude becomes -8, even if it is positive (the scale is then negative): int4
        # has no 8.
        scales[part] = without_zeros(torch.where(-lowest >= highest, lowest, highest) / INT4_MIN)
        values[part] = (groups[part] / scales[part]).round_().clamp_(max=-INT4_MIN - 1)
    return values, scales


def _shared(array: NDArray[Any]) -> ov.Node:
    return op.constant(array, shared_memory=True)

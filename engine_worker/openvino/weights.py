"""Weight matrices as constants of the graph, float32 or quantized to int8 or int4, and who owns their memory: plain
memory, or a file mapped into memory.

The CPU plugin repacks the weights of each matrix product for its kernels, but keeps the original constants alive too.
In plain memory the weights therefore take twice their size. The originals in a mapped file can be dropped from memory
after packing; the kernel reads a page back if the plugin touches it. Codes of quantized matrices that the checkpoint's
own file has in the form of the graph need no other file.
"""

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as op
from torch import Tensor

from engine_worker.formats.mapped import MappedFile
from engine_worker.formats.rounding import Rounding, rounding_of
from engine_worker.formats.stored import Stored, kind_of

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


@dataclass(frozen=True)
class Plain:
    """Not quantized: float32."""

    store: ConstantStore

    def node(self, matrix: Tensor) -> ov.Node:
        """matrix [outputs, inputs] float32 -> a node of the same shape that evaluates to float32."""
        return _shared(self.store.keep(matrix.detach().numpy()))

    def rounded(self, matrix: Tensor) -> Tensor:
        """The values that `node` evaluates to."""
        return matrix


@dataclass(frozen=True)
class Rounded:
    """Rounded to few bits. OpenVINO quantizes the other operand of a product dynamically."""

    store: ConstantStore
    rounding: Rounding

    def node(self, matrix: Tensor) -> ov.Node:
        return stored_node(self.rounding(matrix), self.store)

    def rounded(self, matrix: Tensor) -> Tensor:
        return self.rounding(matrix).decode()


Format = Plain | Rounded
"""How the graph has a weight matrix."""


class Weights(NamedTuple):
    """The formats of a decoder's matrices, for a value of the setting `quantize`."""

    quantize: str
    store: ConstantStore

    def of(self, name: str) -> Format:
        """name: of a weight in the checkpoint."""
        rounding = rounding_of(self.quantize, name)
        return Plain(self.store) if rounding is None else Rounded(self.store, rounding)


def constant(values: Tensor) -> ov.Node:
    """A constant that shares the tensor's memory."""
    return _shared(values.detach().numpy())


def rows_of(table: Format, matrix: Tensor, ids: ov.Node) -> ov.Node:
    """Embedding lookup: ids [T] -> those rows of the matrix [T, inputs] float32."""
    axis = op.constant(np.int64(0))
    if isinstance(table, Plain):
        return op.gather(table.node(matrix), ids, axis)
    # Gather first, then dequantize: the plugin would otherwise keep the whole dequantized matrix.
    stored = table.rounding(matrix)
    rows = op.gather(_shared(table.store.keep(stored.codes.numpy())), ids, axis)
    return op.multiply(op.convert(rows, ov.Type.f32), op.gather(constant(stored.scales), ids, axis))


def stored_node(stored: Stored, store: ConstantStore) -> ov.Node:
    """[N, K] float32, without an order of inputs. The plugin recognizes no other pattern: convert, subtract, multiply,
    reshape."""
    rows, columns = stored.shape
    grouped = stored.group < columns
    shape = [rows, columns // stored.group, stored.group] if grouped else [rows, columns]
    codes = ov.Tensor(store.keep(stored.codes.numpy()), ov.Shape(shape), getattr(ov.Type, stored.type))
    node = op.convert(op.constant(codes), ov.Type.f32)
    if stored.zeros is not None:
        zeros = stored.zeros.unsqueeze(2) if grouped else stored.zeros
        if kind_of(stored).zeros == "integer":
            # Bytes, or the plugin computes in float32.
            node = op.subtract(node, op.convert(kept(zeros.to(torch.uint8), store), ov.Type.f32))
        else:
            node = op.subtract(node, kept(zeros, store))
    node = op.multiply(node, kept(stored.scales.unsqueeze(2) if grouped else stored.scales, store))
    return op.reshape(node, op.constant(np.array([rows, columns], np.int64)), False) if grouped else node


def kept(numbers: Tensor, store: ConstantStore) -> ov.Node:
    """A constant that the store owns."""
    return _shared(store.keep(numbers.contiguous().numpy()))


def _shared(array: NDArray[Any]) -> ov.Node:
    return op.constant(array, shared_memory=True)

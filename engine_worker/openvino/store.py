"""Owns the memory of a graph's constants, the weights: plain memory, or a file mapped into memory.

The CPU plugin repacks the weights of each matrix product for its kernels, but keeps the original constants alive too.
In plain memory the weights therefore take twice their size. The originals in a mapped file can be dropped from memory
after packing; the kernel reads a page back if the plugin touches it.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_FILE_BYTES = 1 << 20
"""Smaller arrays stay in plain memory."""
MIN_FREE_DISK_BYTES = 1 << 30
"""Disk space that the file leaves free for other programs."""


class ConstantStore:
    """Constants in plain memory."""

    def __init__(self) -> None:
        self.summary = "in memory"
        """Where the constants are, for the log."""
        self._arrays: list[NDArray[Any]] = []

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """Store an array; returns one with the same values, which stays valid while this store exists."""
        # OpenVINO does not hold a reference to every array whose memory its constants share.
        self._arrays.append(array)
        return array

    def release(self) -> None:
        """Call when the plugin has packed the weights: it rarely reads the originals afterwards."""


class FileStore(ConstantStore):
    """Constants in an unnamed temporary file, mapped into memory. `release` drops their pages from memory; a page that
    is read later comes back from the file. If the file cannot be created, or the disk is nearly full, constants stay in
    plain memory, and `summary` says why."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.summary = f"in a file in {folder}"
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
        if self._file is not None and array.nbytes >= MIN_FILE_BYTES:
            try:
                array = self._write(array)
            except OSError as error:
                self._fall_back(error)
        return super().keep(array)

    def release(self) -> None:
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
        self.summary = f"in memory: {self.summary} failed: {error.strerror or error}"


def open_store(folder: str | None) -> ConstantStore:
    """The store for the setting `weights_folder`."""
    return ConstantStore() if folder is None else FileStore(Path(folder).expanduser())

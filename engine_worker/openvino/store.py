"""Where the constants of a graph are.

The plugin packs the weights of each product for its kernels, but keeps what it packed them from. In plain memory they
take their size twice.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 1 << 20
"""Smaller arrays stay in memory."""
LEFT_FREE = 1 << 30
"""Bytes of the disk that others need."""


class Store:
    """Constants in memory."""

    def __init__(self) -> None:
        self.summary = "in memory"
        """For the log."""
        self._kept: list[NDArray[Any]] = []

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """The same values, valid as long as the store exists."""
        # OpenVINO does not keep every array alive that its constants share.
        self._kept.append(array)
        return array

    def release(self) -> None:
        """The plugin has packed them, and reads little of them from now on."""


class FileStore(Store):
    """Constants in a file without a name. Released pages leave the memory, and return when they are read. Where there
    is no such file, or no room in it, constants stay in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.summary = f"in a file in {folder}"
        self._maps: list[mmap.mmap] = []
        self._size = 0
        self._file: Any = None
        try:
            if not hasattr(os, "posix_fallocate"):
                raise OSError("this system cannot reserve its blocks")
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as there are maps
        except OSError as error:
            self._end(error)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        if self._file is not None and array.nbytes >= LEAST_BYTES:
            try:
                array = self._written(array)
            except OSError as error:
                self._end(error)
        return super().keep(array)

    def release(self) -> None:
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)

    def _written(self, array: NDArray[Any]) -> NDArray[Any]:
        start, size = self._size, -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        disk = os.fstatvfs(self._file.fileno())
        if disk.f_bavail * disk.f_frsize < size + LEFT_FREE:
            raise OSError("the disk is nearly full")
        # Without blocks of its own a page that cannot be written ends the process.
        os.posix_fallocate(self._file.fileno(), start, size)
        self._size += size
        pages = mmap.mmap(self._file.fileno(), size, offset=start)
        self._maps.append(pages)
        found = np.frombuffer(pages, array.dtype, array.size).reshape(array.shape)
        found[...] = array
        return found

    def _end(self, error: OSError) -> None:
        self._file = None
        self.summary = f"in memory: {self.summary} failed: {error.strerror or error}"


def open_store(folder: str | None) -> Store:
    return Store() if folder is None else FileStore(Path(folder).expanduser())

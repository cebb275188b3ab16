"""The blocks in the pool files of this machine's engines."""

from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.peer_files import PeerFiles

MAX_LAYOUTS = 16
"""Layouts whose files are kept open."""


class StoredBlock(NamedTuple):
    total: int
    """Its `block_sum`."""
    data: memoryview
    """Its parts, one after the other."""


class MemoryTier:
    """Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the engines' `kv_folder`."""
        self._folder = folder
        self._files: OrderedDict[Layout, PeerFiles] = OrderedDict()

    def files(self, layout: Layout) -> PeerFiles:
        """The files with this layout, as they are now."""
        files = self._files.pop(layout, None) or PeerFiles(self._folder / layout.folder, layout)
        if files.refresh():
            self._files[layout] = files
            if len(self._files) > MAX_LAYOUTS:
                self._files.popitem(last=False)
        return files


def read_from(files: PeerFiles, digest: bytes) -> StoredBlock | None:
    """None if no file has the block. Its bytes are not verified."""
    for found in files.find(digest):
        with suppress(OSError):  # As in `find`.
            data = found.file.read(found, digest)
            if data is not None:
                return StoredBlock(found.total, data)
    return None

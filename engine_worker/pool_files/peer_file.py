"""The pool file of another engine, living or dead, as this engine reads it.

Everything read is a hint until it is verified: a block counts once its copy has the sum that its entry had before and
after the copy. The file is read, not mapped, so that it may be truncated or deleted at any moment.
"""

import os
import struct
import weakref
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_worker.pool_files.layout import BUCKET, HASH_BYTES, Layout, Places, bucket_of, num_blocks_of
from engine_worker.pool_files.pool_file import PoolFile

HEAD: Final = struct.Struct(f"<QQ8xQ{HASH_BYTES}s")
"""The beginning of an entry: version, valid, sum and hash. numpy would take ten times as long."""


class Found(NamedTuple):
    """A block of another engine's file."""

    file: "PeerFile"
    block: int
    version: int
    total: int
    """Its `block_sum`."""


class PeerFile:
    def __init__(self, path: str, layout: Layout) -> None:
        """Raises OSError if it cannot be read, and ValueError if it is not a complete file of this layout, and this
        user's alone."""
        self.path = path
        self._layout = layout
        self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            num_blocks = num_blocks_of(self._file, layout)
            if num_blocks is None:
                raise ValueError("not a complete pool file of this user alone")
            self._places = Places.of(layout, num_blocks)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self._num_blocks = num_blocks
        self._entry_bytes, self._block_bytes = layout.entry.itemsize, layout.block_bytes
        # Closed with the last reference: another thread may still be reading.
        weakref.finalize(self, os.close, self._file)

    def find(self, digest: bytes) -> Found | None:
        """The valid block with this hash. Raises OSError."""
        bucket = bucket_of(digest, self._places.num_buckets)
        slots = os.pread(self._file, BUCKET * 4, self._places.buckets + bucket * BUCKET * 4)
        for slot in memoryview(slots[: len(slots) // 4 * 4]).cast("I"):
            if 0 < slot <= self._num_blocks and (found := self._entry(slot - 1, digest)) is not None:
                return found
        return None

    def copy(self, found: Found, digest: bytes, target: PoolFile, block: int) -> bool:
        """Copy a block to a reserved block of this engine's file. False if it is not whole, or no longer there. Raises
        OSError."""
        for start, part in zip(self._places.parts, target.parts, strict=True):
            size = part.shape[1]
            if os.preadv(self._file, [part[block].data], start + found.block * size) != size:
                return False
        # The owner may have replaced the block meanwhile, in part or whole.
        return self._entry(found.block, digest) == found and target.sum(block) == found.total

    def read(self, found: Found, digest: bytes) -> memoryview | None:
        """The parts of a block one after the other. None if it is no longer there. The caller must compare the
        sum of the bytes with the entry's. Raises OSError."""
        data, at = np.empty(self._block_bytes, np.uint8).data, 0
        for start, size in zip(self._places.parts, self._layout.parts, strict=True):
            if os.preadv(self._file, [data[at : at + size]], start + found.block * size) != size:
                return None
            at += size
        return data if self._entry(found.block, digest) == found else None

    def entries(self) -> NDArray[np.void]:
        """All entries, as they are now. One that is being written is neither its old nor its new content. Raises
        OSError."""
        dtype = self._layout.entry
        data = os.pread(self._file, self._num_blocks * dtype.itemsize, self._places.entries)
        return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)

    def _entry(self, block: int, digest: bytes) -> Found | None:
        data = os.pread(self._file, HEAD.size, self._places.entries + block * self._entry_bytes)
        if len(data) < HEAD.size:
            return None
        version, valid, total, content = HEAD.unpack(data)
        return Found(self, block, version, total) if valid and content == digest else None

"""The pool of blocks of one engine as a file, as its owner uses it.

The owner holds the file's lock as long as it lives and alone writes to the file. Other engines read it, while the owner
lives or after its death; see `peer_file`. The next engine adopts the file of a dead one, with its content.

An entry is valid only while its block has the content: the owner clears it before the block is used for other content,
and writes it after the block was computed. So a file is right at every moment, whenever the owner dies.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_worker.pool_files.layout import (
    ADAPTER_BYTES,
    BUCKET,
    FORMAT,
    HEADER,
    MAGIC,
    Layout,
    Places,
    bucket_of,
    check_of,
    in_pages,
)
from engine_worker.pool_files.memory import replace_by_private
from engine_worker.step import Content

RESERVE_BYTES: Final = 32 << 20
"""Memory that is reserved at a time: no more than is soon used, because reserved memory is occupied."""
SPARE_FRACTION: Final = 0.1
"""Fraction of the folder's file system that is left to others."""
Warn = Callable[[str], None]


class PoolFile:
    def __init__(self, file: int, path: str, layout: Layout, num_blocks: int, warn: Warn) -> None:
        """`file`: descriptor of the locked file, which has the size of `num_blocks` blocks. `warn` is called with the
        reason if blocks are kept in private memory."""
        self.path = path
        self.layout = layout
        self.num_blocks = num_blocks
        self.damaged = 0
        """Blocks that could not be adopted: they or their entries are not what their owner has written."""
        self._file = file
        self._warn = warn
        self._places = Places.of(layout, num_blocks)
        self._map = mmap.mmap(file, self._places.size)
        self._header = np.frombuffer(self._map, HEADER, 1)
        self._entries = np.frombuffer(self._map, layout.entry, num_blocks, self._places.entries)
        fields = ("valid", "version", "check", "hash")
        self._valid, self._version, self._check, self._hash = (self._entries[name] for name in fields)
        buckets = np.frombuffer(self._map, "<u4", self._places.num_buckets * BUCKET, self._places.buckets)
        self._buckets = buckets.reshape(-1, BUCKET)
        self.parts = [
            np.frombuffer(self._map, np.uint8, (num_blocks + 1) * size, start).reshape(num_blocks + 1, size)
            for start, size in zip(self._places.parts, layout.parts, strict=True)
        ]
        """[num_blocks + 1, bytes] of each tensor, in the file's memory. New blocks are zeros."""
        self._words = list(self._as_words())
        self._reserved = 0
        """Leading blocks whose memory is reserved: writing to others could end the process."""
        self._shared = num_blocks
        """Leading blocks that are in the file; the memory of the others is private."""
        self._sums: dict[int, int] = {}
        """Sums that a GPU has computed of blocks which it has copied to the file."""

    def create(self, sizing: bytes) -> None:
        """Begin an empty file. Raises OSError if there is no memory for its index."""
        self._take(0, self._places.parts[0])
        self._reserve_tails()
        self._header["format"], self._header["num_blocks"], self._header["sizing"] = FORMAT, self.num_blocks, sizing
        self._header["magic"] = MAGIC

    @property
    def region(self) -> NDArray[np.uint8]:
        """[parts, bytes]: the memory of `parts`, all of which must have the same length. A row ends with padding."""
        start, length = self._places.parts[0], in_pages(self.parts[0].nbytes)
        return np.frombuffer(self._map, np.uint8, length * len(self.parts), start).reshape(len(self.parts), length)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file in memory."""
        return os.fstat(self._file).st_blocks * 512

    @property
    def num_valid(self) -> int:
        """Blocks with a content that other engines can find."""
        return int(np.count_nonzero(self._valid))

    def reserve(self, block: int) -> None:
        """Call before the first use of a block. Blocks are used in about the order of their numbers."""
        if block >= self._reserved:
            self._reserve(block)

    def reserve_all(self) -> None:
        """Reserve all blocks, because the memory is about to be pinned."""
        if self.used_bytes >= self._places.size:
            # Adopted. Its memory needs no room.
            self._allocate(self.num_blocks)
        for block in range(self.num_blocks):
            self.reserve(block)

    def note_sum(self, block: int, total: int) -> None:
        """Note the sum of a block that was copied to the file: reading the copy again takes longer."""
        self._sums[block] = total

    def take_sum(self, block: int) -> int | None:
        """Remove and return the noted sum; None: no sum was noted."""
        return self._sums.pop(block, None)

    def put(self, block: int, content: Content, total: int | None = None) -> None:
        """Note that a block has this content. `total`: its `block_sum`, if that is known."""
        # A longer name would be cut, and the next owner would report another one.
        if block >= self._shared or len(content.adapter) > ADAPTER_BYTES:
            return
        version = int(self._version[block])
        total = self.sum(block) if total is None else total
        parent = content.parent or bytes(len(content.hash))
        # Not valid yet: the engine may die between two fields.
        self._entries[block] = (
            version + 1, 0, 0, total, content.hash, parent, content.parent is not None, content.adapter, content.tokens
        )  # fmt: skip
        self._check[block] = check_of(self._entries[block])
        self._valid[block] = 1
        self._link(block, self._buckets)

    def clear(self, block: int) -> None:
        """Call before a block is used for other content."""
        if block >= self._shared or not self._valid[block]:
            return
        self._valid[block] = 0
        self._version[block] += 1
        bucket = self._buckets[bucket_of(self._hash[block].tobytes(), self._places.num_buckets)]
        bucket[bucket == block + 1] = 0

    def clear_all(self) -> None:
        self._valid[:] = 0
        self._version[:] += 1
        self._buckets[:] = 0

    def sum(self, block: int) -> int:
        """Differs if bytes were changed, or if two contents are mixed."""
        # One call for all parts of a length: a call takes as long as the sum of some kilobytes.
        total = 0
        for words, weights in self._words:
            total += int((words[:, block].sum(axis=1, dtype=np.uint64) * weights).sum())
        return total & (2**64 - 1)

    def begin_adoption(self) -> int:
        """Note a start with this file; returns not 0 if the one before did not end in `adopted`."""
        starts = int(self._header["starts"][0])
        self._header["starts"] = 1
        return starts

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = str(path)

    def adopted(self) -> Iterator[tuple[int, Content]]:
        """The blocks of the former owner whose content is whole. Raises OSError if there is no memory."""
        valid = np.flatnonzero(self._valid).tolist()
        # Reading memory that was never reserved could end the process, too.
        self._allocate(valid[-1] + 1 if valid else 0)
        if not self.layout.on_host:
            # Blocks of the host pool are only read where they are valid, and pinned memory must not be replaced.
            self.erase(set(range(self._reserved)) - set(valid))
            self._erase_tails()
        self._reserve_tails()
        # Damage could make a version overflow.
        self._version[self._version >> np.uint64(63) > 0] = 0
        for block in valid:
            entry = self._entries[block]
            if int(entry["check"]) != check_of(entry) or int(entry["sum"]) != self.sum(block):
                self._valid[block] = 0
                self.erase([block])
                self.damaged += 1
                continue
            parent = entry["parent"].tobytes() if entry["has_parent"] else None
            tokens = tuple(entry["tokens"].tolist())
            yield block, Content(entry["hash"].tobytes(), tokens, parent, entry["adapter"].decode())
        self._link_all()
        self._header["starts"] = 0

    def write(self, block: int, data: "bytes | memoryview", total: int) -> bool:
        """Copy the parts of a block, one after the other in `data`, to a reserved block. False if they are not whole:
        `total` is the sum that they must have. Then `erase` the block."""
        if len(data) != self.layout.block_bytes:
            return False
        source, start = np.frombuffer(data, np.uint8), 0
        for part in self.parts:
            end = start + part.shape[1]
            part[block] = source[start:end]
            start = end
        return self.sum(block) == total

    def _as_words(self) -> "Iterator[tuple[NDArray[np.unsignedinteger], NDArray[np.uint64]]]":
        """For each length of a part: the parts as [parts, blocks, words], and the weights of their sums."""
        starts, sizes = np.array(self._places.parts), np.array(self.layout.parts)
        for size in np.unique(sizes).tolist():
            (indexes,) = np.nonzero(sizes == size)
            steps = np.diff(starts[indexes])
            for same in [indexes] if (steps == steps[:1]).all() else np.split(indexes, len(indexes)):
                step, dtype = (int(steps[0]) if len(same) > 1 else 0), word_of(size)
                shape, strides = (len(same), self.num_blocks, size // dtype.itemsize), (step, size, dtype.itemsize)
                words = np.ndarray(shape, dtype, self._map, int(starts[same[0]]), strides)
                yield words, weights_of(same)

    def _link(self, block: int, buckets: NDArray[np.uint32]) -> None:
        bucket = buckets[bucket_of(self._hash[block].tobytes(), self._places.num_buckets)]
        empty = np.flatnonzero(bucket == 0)
        if len(empty):
            bucket[empty[0]] = block + 1

    def _link_all(self) -> None:
        """Replace the former owner's buckets. All at once: meanwhile other engines find the blocks in the old ones."""
        buckets = np.zeros_like(self._buckets)
        for block in np.flatnonzero(self._valid).tolist():
            self._link(block, buckets)
        self._buckets[:] = buckets

    def _reserve(self, block: int) -> None:
        step = max(1, RESERVE_BYTES // self.layout.block_bytes)
        end = min(self.num_blocks, max(block + 1, self._reserved + step))
        try:
            self._check_room((end - self._reserved) * self.layout.block_bytes)
            self._allocate(end)
        except OSError as error:
            self._use_private(str(error))

    def _allocate(self, end: int) -> None:
        """Reserve the leading `end` blocks. Raises OSError."""
        count = end - self._reserved
        for start, size in zip(self._places.parts, self.layout.parts, strict=True):
            if count > 0:
                self._take(start + self._reserved * size, count * size)
        self._reserved = max(self._reserved, end)

    def erase(self, blocks: Iterable[int]) -> None:
        """Set blocks to zeros: attention also reads unwritten slots, and a NaN there would spread."""
        for block in blocks:
            for part in self.parts:
                part[block] = 0

    def _erase_tails(self) -> None:
        """Set everything after the reserved blocks to zeros, and free its memory."""
        for part in self.parts:
            # To the end of the last reserved page; the pages after it are freed.
            rest = part[self._reserved :].reshape(-1)
            rest[: in_pages(self._reserved * part.shape[1]) - self._reserved * part.shape[1]] = 0
        for begin, size in self._pages_after(self._reserved):
            self._map.madvise(mmap.MADV_REMOVE, begin, size)

    def _pages_after(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """For each part that has any: (offset, bytes) of the pages after those of its first `num_blocks` blocks."""
        for start, size in zip(self._places.parts, self.layout.parts, strict=True):
            begin, end = (start + in_pages(count * size) for count in (num_blocks, self.num_blocks + 1))
            if begin < end:
                yield begin, end - begin

    def _check_room(self, size: int) -> None:
        """Raises OSError: a full file system would harm others, and their files would end them."""
        system = os.fstatvfs(self._file)
        free = system.f_bavail * system.f_frsize
        if free - size < SPARE_FRACTION * system.f_blocks * system.f_frsize:
            raise OSError(f"{free >> 20} MiB are left")

    def _use_private(self, reason: str) -> None:
        """Take private memory for all blocks that are not reserved."""
        self._shared, self._reserved = self._reserved, self.num_blocks
        for begin, size in self._pages_after(self._shared):
            replace_by_private(self._map, begin, size)
        self._warn(f"{reason}: {self._shared} of {self.num_blocks} blocks are in the file")

    def _reserve_tails(self) -> None:
        """Reserve the spare block of each part, which the owner writes to from the start. Raises OSError."""
        for start, size in zip(self._places.parts, self.layout.parts, strict=True):
            self._take(start + self.num_blocks * size, size)

    def _take(self, start: int, size: int) -> None:
        """Occupy memory. Raises OSError, with the file's path."""
        try:
            os.posix_fallocate(self._file, start, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    def close(self) -> None:
        """Unlock the file, as the end of the process does. Its memory stays mapped as long as it is used."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        with suppress(BufferError):
            self._map.close()


def word_of(size: int) -> np.dtype[np.unsignedinteger]:
    """The longest word of which `size` bytes are a multiple."""
    return next(dtype for dtype in map(np.dtype, ("<u8", "<u4", "<u2", "u1")) if size % dtype.itemsize == 0)


def block_sum(parts: "Iterator[NDArray[np.unsignedinteger]]") -> int:
    """Sum of a block's words. Each part has a weight of its own, so that parts of two places do not compensate."""
    total = 0
    for index, words in enumerate(parts):
        total += int(weights_of(np.array(index))) * int(words.sum(dtype=np.uint64))
    return total & (2**64 - 1)


def weights_of(indexes: NDArray[np.int64]) -> NDArray[np.uint64]:
    return (2 * indexes + 1).astype(np.uint64)

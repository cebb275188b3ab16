"""Blocks on a disk: a file for each, which is missing, whole, or damaged and then deleted.

FOLDER/LAYOUT/HASH.block    header, then the parts of the block one after the other
FOLDER/*.new                being written; deleted at the next start
FOLDER/*.dropped            a folder of blocks to be deleted
"""

import fcntl
import os
import shutil
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import structlog

from engine_worker.keeper.memory import StoredBlock
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.memory import check_private
from sluice.host.limited_log import LimitedLog

FORMAT: Final = 1
HEADER: Final = struct.Struct("<8sIIQ")
"""Magic, format, CRC, and the block's sum."""
MAGIC: Final = b"SLUICEKB"
SUFFIX, NEW, DROPPED = ".block", ".new", ".dropped"
USE_SECONDS: Final = 60.0
"""A file that is used again within this time is not touched again."""

Key = tuple[str, bytes]
"""Folder of the layout, and hash."""


@dataclass(slots=True)
class _File:
    size: int
    used_at: float = float("-inf")


class DiskTier:
    """Thread-safe. A disk that fails is one without the block; only the constructor raises."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises ValueError unless only this user can enter the folder and no other keeper uses it, and OSError if it
        cannot be read."""
        check_private(folder, "disk_folder")
        self.damaged = 0
        """Files that were deleted because they were not whole."""
        self.generation = 0
        """Grows whenever the blocks are dropped."""
        self.num_bytes = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._log = LimitedLog(structlog.get_logger())
        self._lock = threading.Lock()
        self._folder_lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._folder_lock)
            raise ValueError(f"disk_folder: another keeper uses {folder}") from error
        for path in folder.glob(f"*{NEW}"):
            path.unlink(missing_ok=True)
        self._files: OrderedDict[Key, _File] = OrderedDict()
        """The block to evict next is the first."""
        for key, size in _listed(folder):
            self._files[key] = _File(size)
            self.num_bytes += size
        self._make_room(0)

    @property
    def num_blocks(self) -> int:
        return len(self._files)

    def has(self, layout: Layout, digest: bytes) -> bool:
        return (layout.folder, digest) in self._files

    def read(self, layout: Layout, digest: bytes) -> StoredBlock | None:
        """A whole block; None if it is not there or damaged."""
        key = layout.folder, digest
        file = self._files.get(key)
        if file is None:
            return None
        # Otherwise it was found as part of its chain, whose order is kept.
        if not self._recently_used(file):
            self.use(layout, [digest])
        try:
            data = memoryview(self._path(key).read_bytes())
        except OSError as error:
            self._failed("read", error)
            data = memoryview(b"")
        block = _opened(data, layout)
        if block is None:
            with self._lock:
                self.damaged += 1
                self._forget(key)
        return block

    def write(self, layout: Layout, digest: bytes, block: StoredBlock, generation: int) -> bool:
        """Store a block, and evict others. Returns False if it was not stored: blocks were dropped since `generation`,
        or the disk has no room or fails."""
        size = HEADER.size + len(block.data)
        key, temporary = (layout.folder, digest), self._folder / f"{os.urandom(8).hex()}{NEW}"
        try:
            if size > self._max_bytes:
                return False
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(HEADER.pack(MAGIC, FORMAT, _check(block), block.total))
                file.write(block.data)
            with self._lock:
                if generation != self.generation:
                    return False
                self._forget(key)
                self._make_room(size)
                (self._folder / layout.folder).mkdir(mode=0o700, exist_ok=True)
                temporary.rename(self._path(key))
                self._files[key] = _File(size)
                self.num_bytes += size
                return True
        except OSError as error:
            self._failed("written", error)
            return False
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def use(self, layout: Layout, chain: Sequence[bytes]) -> None:
        """Note that these blocks of a chain, of which some may not be here, are used: the last will be evicted
        first."""
        stamp = time.time_ns()
        with self._lock:
            for at, digest in enumerate(reversed(chain)):
                self._use((layout.folder, digest), stamp + at)

    def _use(self, key: Key, stamp: int) -> None:
        file = self._files.get(key)
        if file is not None:
            self._files.move_to_end(key)
            if not self._recently_used(file):
                file.used_at = time.monotonic()
                # For the next start. The file system's own clock is too coarse to keep the order.
                with suppress(OSError):
                    os.utime(self._path(key), ns=(stamp, stamp))

    def _recently_used(self, file: _File) -> bool:
        return time.monotonic() - file.used_at <= USE_SECONDS

    def drop(self) -> None:
        """Delete all blocks, also those that are being written."""
        with self._lock:
            self.generation += 1
            self._files.clear()
            self.num_bytes = 0
            for folder in _folders(self._folder):
                try:
                    # A rename is done at once; `clean` deletes the content.
                    folder.rename(folder.with_name(f"{os.urandom(8).hex()}{DROPPED}"))
                except OSError as error:
                    self._failed("dropped", error)

    def clean(self) -> None:
        """Delete what was dropped. Takes long: call it in a thread."""
        for folder in self._folder.glob(f"*{DROPPED}"):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Another keeper may use the folder."""
        os.close(self._folder_lock)

    def _path(self, key: Key) -> Path:
        return self._folder / key[0] / f"{key[1].hex()}{SUFFIX}"

    def _make_room(self, size: int) -> None:
        while self._files and self.num_bytes + size > self._max_bytes:
            self._forget(next(iter(self._files)))

    def _forget(self, key: Key) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self.num_bytes -= file.size
            with suppress(OSError):
                self._path(key).unlink()

    def _failed(self, what: str, error: OSError) -> None:
        self._log.warning("disk_failed", not_done=what, error=error.strerror or str(error))


def _opened(data: memoryview, layout: Layout) -> StoredBlock | None:
    """The block in a file; None if the file is damaged."""
    if len(data) != HEADER.size + layout.block_bytes:
        return None
    magic, number, check, total = HEADER.unpack_from(data)
    block = StoredBlock(total, data[HEADER.size :])
    return block if (magic, number, check) == (MAGIC, FORMAT, _check(block)) else None


def _check(block: StoredBlock) -> int:
    """CRC of the bytes and the sum."""
    return crc32(block.total.to_bytes(8, "little"), crc32(block.data))


def _listed(folder: Path) -> Iterator[tuple[Key, int]]:
    """The blocks and their sizes, the one that was not used for longest first. Raises OSError."""
    found: list[tuple[int, Key, int]] = []
    for layout in _folders(folder):
        for path in layout.glob(f"*{SUFFIX}"):
            with suppress(ValueError):  # None of ours.
                status = path.stat()
                found.append((status.st_mtime_ns, (layout.name, bytes.fromhex(path.stem)), status.st_size))
    for _, key, size in sorted(found):
        yield key, size


def _folders(folder: Path) -> Iterable[Path]:
    """The folders of layouts."""
    return [path for path in folder.iterdir() if path.is_dir() and path.suffix != DROPPED]

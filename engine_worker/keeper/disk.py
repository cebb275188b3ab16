"""Blocks on a disk: a file for each, which is missing, whole, or damaged and then deleted.

FOLDER/LAYOUT/HASH.block    header, then the parts of the block one after the other
FOLDER/RANDOM.new           being written; deleted at the next start
FOLDER/RANDOM.dropped       a folder of blocks to be deleted

LAYOUT and RANDOM have 16 hexadecimal digits, HASH has 32. Whatever has another name is not ours and stays untouched.
"""

import fcntl
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
BLOCK_NAME: Final = re.compile(rf"[0-9a-f]{{32}}\{SUFFIX}")
LAYOUT_NAME: Final = re.compile(r"[0-9a-f]{16}")
NEW_NAME: Final = re.compile(rf"[0-9a-f]{{16}}\{NEW}")
DROPPED_NAME: Final = re.compile(rf"[0-9a-f]{{16}}\{DROPPED}")
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
        """Raises ValueError unless only this user can enter the folder and no other keeper uses it, and OSError if the
        disk fails."""
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
        self._files: OrderedDict[Key, _File] = OrderedDict()
        """The block to evict next is the first."""
        self._folder_lock = _locked(folder)
        try:
            self._load()
        except OSError:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        return len(self._files)

    def _load(self) -> None:
        for path in _named(self._folder, NEW_NAME):
            if path.is_file():
                path.unlink(missing_ok=True)
        for key, size in _listed(self._folder):
            self._files[key] = _File(size)
            self.num_bytes += size
        self._make_room(0)

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
        except FileNotFoundError:
            self._lose(key, file)
            return None
        except OSError as error:
            # It may be whole: the next time it may be read.
            self._failed("read", error)
            return None
        block = _opened(data, key, layout)
        if block is None and self._lose(key, file):
            self.damaged += 1
        return block

    def _lose(self, key: Key, file: _File) -> bool:
        """Forget a file that is not as it should be. Returns False if it was evicted or replaced meanwhile."""
        with self._lock:
            if self._files.get(key) is not file:
                return False
            self._forget(key)
            return True

    def write(self, layout: Layout, digest: bytes, block: StoredBlock, generation: int) -> bool:
        """Store a block, and evict others. Returns False if it was not stored: blocks were dropped since `generation`,
        or the disk has no room or fails."""
        size = HEADER.size + len(block.data)
        key, temporary = (layout.folder, digest), self._folder / f"{os.urandom(8).hex()}{NEW}"
        try:
            if size > self._max_bytes:
                return False
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(HEADER.pack(MAGIC, FORMAT, _check(key, block), block.total))
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

    def drop(self) -> bool:
        """Delete all blocks, also those that are being written. None of them is here afterwards. Returns False
        if the disk did not let some go: these will be here again after a restart."""
        with self._lock:
            self.generation += 1
            self._files.clear()
            self.num_bytes = 0
            dropped = True
            try:
                folders = _folders(self._folder)
            except OSError as error:
                self._failed("dropped", error)
                return False
            for folder in folders:
                try:
                    # A rename is done at once; `clean` deletes the content.
                    folder.rename(folder.with_name(f"{os.urandom(8).hex()}{DROPPED}"))
                except OSError as error:
                    self._failed("dropped", error)
                    dropped = False
            return dropped

    def clean(self) -> None:
        """Delete what was dropped. Takes long: call it in a thread. Raises OSError if the disk fails."""
        for folder in _folders(self._folder, DROPPED_NAME):
            for path in _named(folder, BLOCK_NAME):
                with suppress(OSError):  # The next time.
                    path.unlink()
            with suppress(OSError):  # It also has files of the user.
                folder.rmdir()

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


def _locked(folder: Path) -> int:
    """A descriptor that keeps other keepers from using the folder. Raises ValueError if one does, and OSError."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ValueError(f"disk_folder: another keeper uses {folder}") from error
    except OSError:
        os.close(lock)
        raise
    return lock


def _opened(data: memoryview, key: Key, layout: Layout) -> StoredBlock | None:
    """The block in a file; None if the file is damaged."""
    if len(data) != HEADER.size + layout.block_bytes:
        return None
    magic, number, check, total = HEADER.unpack_from(data)
    block = StoredBlock(total, data[HEADER.size :])
    return block if (magic, number, check) == (MAGIC, FORMAT, _check(key, block)) else None


def _check(key: Key, block: StoredBlock) -> int:
    """CRC of the bytes, the sum, and what the file is named after: under another name it is damaged."""
    folder, digest = key
    return crc32(block.total.to_bytes(8, "little") + folder.encode() + digest, crc32(block.data))


def _listed(folder: Path) -> Iterator[tuple[Key, int]]:
    """The blocks and their sizes, the one that was not used for longest first. Raises OSError."""
    found: list[tuple[int, Key, int]] = []
    for layout in _folders(folder):
        for path in _named(layout, BLOCK_NAME):
            with suppress(FileNotFoundError):  # A link to nothing.
                status = path.stat()
                found.append((status.st_mtime_ns, (layout.name, bytes.fromhex(path.stem)), status.st_size))
    for _, key, size in sorted(found):
        yield key, size


def _folders(folder: Path, name: re.Pattern[str] = LAYOUT_NAME) -> list[Path]:
    """The folders of layouts. Raises OSError."""
    return [path for path in _named(folder, name) if path.is_dir() and not path.is_symlink()]


def _named(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """What has such a name in a folder. Raises OSError."""
    return [path for path in folder.iterdir() if name.fullmatch(path.name)]

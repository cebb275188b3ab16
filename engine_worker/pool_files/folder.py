"""The folder of the pool files of all engines that share a machine."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

import numpy as np

from engine_worker.pool_files.layout import HEADER, SIZING_BYTES, Layout, Places, num_blocks_of
from engine_worker.pool_files.layout_file import write_layout
from engine_worker.pool_files.memory import check_folder
from engine_worker.pool_files.peer_files import SUFFIX, PeerFiles
from engine_worker.pool_files.pool_file import PoolFile, Warn

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PoolFolder:
    """Opens this engine's file, and copies blocks from those of others."""

    def __init__(self, path: Path, name: str, warn: Warn, *, fetch: bool = True) -> None:
        """`name`: the engine's id. `warn`: called with the reason if blocks cannot be kept in the folder. `fetch`:
        whether to copy blocks from other engines. Raises ValueError if the folder must not be used."""
        check_folder(path)
        self.root = path
        # A name may contain any character, also those that separate folders.
        self._name = quote(name, safe="")
        self._warn = warn
        self._fetch = fetch
        self._folder = path
        self._own: PoolFile | None = None
        self._peers: PeerFiles | None = None

    def open(self, layout: Layout, sizing: object, count_blocks: Callable[[], int]) -> PoolFile | None:
        """Adopt the file of a dead engine with this layout, or create one. `sizing`: the settings that decide on the
        number of blocks: files of other sizes are not adopted. `count_blocks`: called for a new file only, because an
        adopted one occupies memory already. None if there is no room: use private memory."""
        self._folder = self.root / layout.folder
        digest = blake2b(repr(sizing).encode(), digest_size=SIZING_BYTES).digest()
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_layout(self._folder, layout)
            opened = self._adopt(layout, digest) or self._create(layout, digest, count_blocks())
        except OSError as error:
            self._warn(str(error))
            return None
        self._own = opened
        self._peers = PeerFiles(self._folder, layout, opened.path) if self._fetch else None
        return opened

    @property
    def group(self) -> str:
        """The same for all engines that read each other's files, in hex. Empty: this one reads none."""
        if self._own is None or not self._fetch:
            return ""
        status, boot = os.stat(self._folder), BOOT_ID.read_text() if BOOT_ID.is_file() else ""
        return blake2b(repr((boot, status.st_dev, status.st_ino)).encode(), digest_size=8).hexdigest()

    @property
    def empty(self) -> bool:
        """Whether no other engine has a file, as far as this one may read them. Looks for new files: call it in one
        thread, before `has`."""
        return self._peers is None or not self._peers.refresh()

    def has(self, digest: bytes) -> bool:
        """Whether a block with this hash is in another engine's file."""
        return self._peers is not None and any(self._peers.find(digest))

    def copy(self, digest: bytes, block: int) -> int | None:
        """Copy a block to a reserved block of this engine's file; returns its sum, or None if it is not there any more
        or not whole. May be called in another thread."""
        if self._own is None:
            return None
        for found in () if self._peers is None else self._peers.find(digest):
            with suppress(OSError):  # As in `find`.
                if found.file.copy(found, digest, self._own, block):
                    return found.total
        # What was copied in vain may be damaged.
        self._own.erase([block])
        return None

    def delete_dead(self) -> None:
        """Delete the files of engines that have ended."""
        for path in self.root.glob(f"*/*{SUFFIX}"):
            if (self._own is None or str(path) != self._own.path) and (file := _lock(path)) is not None:
                _delete(path, file)

    def _adopt(self, layout: Layout, sizing: bytes) -> PoolFile | None:
        for path in self._candidates():
            file = _lock(path)
            if file is None:
                continue
            # The bytes of another layout may have the same sizes, and mean something else.
            num_blocks = _num_blocks(file, layout, sizing) if path.parent == self._folder else None
            if num_blocks is None and not self._is_own(path):
                # Its owner may have other settings, and come back.
                os.close(file)
                continue
            try:
                adopted = None if num_blocks is None else PoolFile(file, str(path), layout, num_blocks, self._warn)
            except OSError:  # No memory for its mapping.
                os.close(file)
                raise
            # An engine that died before it was ready may have died of this file, or of the memory that it occupies.
            if adopted is not None and not adopted.begin_adoption():
                if not self._is_own(path):
                    # A launcher finds an engine's files by their names.
                    adopted.rename(self._new_path())
                return adopted
            _delete(path, file)
        return None

    def _candidates(self) -> Iterator[Path]:
        """This engine's former files, also of other layouts, then those of others with this layout."""
        yield from filter(self._is_own, self.root.glob(f"*/*{SUFFIX}"))
        yield from (path for path in self._folder.glob(f"*{SUFFIX}") if not self._is_own(path))

    def _is_own(self, path: Path) -> bool:
        """Whether this engine, or a former one with its name, has created the file or taken it over."""
        return path.name.removesuffix(SUFFIX).rpartition(".")[0] == self._name

    def _create(self, layout: Layout, sizing: bytes, num_blocks: int) -> PoolFile:
        path = self._new_path()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file).st_nlink:
                raise OSError(f"{path} was deleted by an engine that flushed its cache")
            os.ftruncate(file, Places.of(layout, num_blocks).size)
            created = PoolFile(file, str(path), layout, num_blocks, self._warn)
            created.create(sizing)
            # Engines that have listed the folder before the file was complete list it again.
            os.utime(self._folder)
        except OSError:
            _delete(path, file)
            raise
        return created

    def _new_path(self) -> Path:
        return self._folder / f"{self._name}.{os.urandom(4).hex()}{SUFFIX}"


def _lock(path: Path) -> int | None:
    """A descriptor of the file, locked; None if its owner lives, or if it has gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Deleted before it was locked: the name may be another file's by now.
        if os.fstat(file).st_nlink:
            return file
    except OSError:
        pass
    os.close(file)
    return None


def _num_blocks(file: int, layout: Layout, sizing: bytes) -> int | None:
    """Number of blocks of a file that can be adopted; None if it is of another layout or sizing, or damaged."""
    num_blocks = num_blocks_of(file, layout)
    if num_blocks is None:
        return None
    header = np.frombuffer(os.pread(file, HEADER.itemsize, 0), HEADER)
    return num_blocks if header["sizing"][0].tobytes() == sizing else None


def _delete(path: Path, file: int) -> None:
    """Delete a locked file. Truncated first: engines that have it open would keep its memory."""
    with suppress(OSError):  # Somebody has deleted it already.
        os.ftruncate(file, 0)
        path.unlink()
    os.close(file)

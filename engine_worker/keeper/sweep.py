"""A thread that copies long prefixes from the engines' pool files to disk."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np
import structlog
from numpy.typing import NDArray

from engine_worker.keeper.chains import long_chains
from engine_worker.keeper.disk import DiskTier
from engine_worker.keeper.memory import StoredBlock
from engine_worker.pool_files.layout import HASH_BYTES, Layout, check_of
from engine_worker.pool_files.layout_file import read_layout
from engine_worker.pool_files.peer_file import Found, PeerFile
from engine_worker.pool_files.peer_files import PeerFiles
from engine_worker.pool_files.pool_file import block_sum, word_of
from sluice.host.limited_log import LimitedLog

LONG_PREFIX_TOKENS: Final = 512
"""Shorter prefixes are computed again about as fast as they are read from a disk."""
SWEEP_SECONDS: Final = 5.0
BYTES_PER_SECOND: Final = 200e6
"""Limit on what a sweep writes: engines need the memory's bandwidth, and answers the disk's."""
LARGEST_SHARE: Final = 0.5
"""Part of the disk that a sweep may write, so that it does not evict the roots of what it writes."""
NICE: Final = 10


Table = tuple[PeerFile, NDArray[np.void]]
"""A file and its entries."""
State = tuple[tuple[str, int], ...]
"""For each file its path and a CRC that changes with any of its entries."""


@dataclass(frozen=True, slots=True)
class _Entry:
    found: Found
    row: np.void
    parent: bytes | None


@dataclass(slots=True)
class _Swept:
    """What is known of a layout's blocks from the sweeps before."""

    files: PeerFiles
    seen: set[bytes] = field(default_factory=set)
    """Blocks that were there in the latest sweep."""
    written: set[bytes] = field(default_factory=set)
    """Blocks that were on disk at some time while they were in memory. They are not written again: if there is more in
    memory than there is room on the disk, sweeps would replace one by the other forever."""
    state: State = ()
    """The files' in the latest sweep."""
    finished: bool = False
    """Whether that sweep had nothing to write, and the next one will not either until `state` changes."""


class Sweep:
    """`run` is the thread's function; `sweep` is called by one thread."""

    def __init__(self, folder: Path, disk: DiskTier, max_bytes: int) -> None:
        """`folder`: the engines' `kv_folder`. `max_bytes`: size of the disk tier."""
        self._folder = folder
        self._disk = disk
        self._limit = self._room = int(max_bytes * LARGEST_SHARE)
        self._log = LimitedLog(structlog.get_logger())
        self._stopped = threading.Event()
        self._generation = disk.generation
        self._layouts: dict[Layout, _Swept] = {}

    def start(self) -> None:
        threading.Thread(target=self.run, name="sweep", daemon=True).start()

    def stop(self) -> None:
        """The thread ends soon. What it is writing is deleted at the next start."""
        self._stopped.set()

    def run(self) -> None:
        with suppress(OSError):
            # On Linux a priority is a thread's.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopped.wait(SWEEP_SECONDS):
            try:
                self._disk.clean()
                self.sweep()
            except Exception:  # noqa: BLE001 - whatever an engine has left in a file, the next sweep goes on
                self._log.exception("sweep_failed")

    def sweep(self) -> None:
        """Copy what was there in the last sweep, too: blocks that are soon replaced are not worth it."""
        self._room = self._limit
        if (generation := self._disk.generation) != self._generation:
            # The caches are being flushed: what is in memory now may be gone in a moment.
            self._generation, self._layouts = generation, {}
        layouts = [layout for path in self._folder.iterdir() if (layout := read_layout(path)) is not None]
        self._layouts = {
            layout: self._layouts.get(layout) or _Swept(PeerFiles(self._folder / layout.folder, layout))
            for layout in layouts
        }
        for layout, swept in self._layouts.items():
            if not self._sweep_layout(layout, swept):
                return

    def _sweep_layout(self, layout: Layout, swept: _Swept) -> bool:
        """Returns False if the sweep must end."""
        tables = _tables(swept.files)
        state = _state(tables)
        unchanged = state == swept.state
        if unchanged and swept.finished:
            return True
        swept.state, swept.finished = state, False
        entries = _entries(tables)
        copied = False
        for chain in self._chains(layout, swept, entries):
            if any(digest not in swept.written for digest in chain):
                copied = True
                going_on = self._copy(layout, swept, chain, entries)
                # Together, so that they are evicted together, from the end.
                self._disk.use(layout, chain)
                if not going_on:
                    return False
        # Unchanged: all entries were there in the sweep before, too.
        swept.finished = unchanged and not copied
        return True

    def _chains(self, layout: Layout, swept: _Swept, entries: Mapping[bytes, _Entry]) -> Iterator[list[bytes]]:
        """The long prefixes among the entries that were there in the last sweep."""
        lasting = {digest: entry.parent for digest, entry in entries.items() if digest in swept.seen}
        swept.seen = set(entries)
        swept.written &= swept.seen
        swept.written.update(digest for digest in lasting if self._disk.has(layout, digest))
        return long_chains(lasting, -(-LONG_PREFIX_TOKENS // layout.tokens_per_block))

    def _copy(self, layout: Layout, swept: _Swept, chain: list[bytes], entries: Mapping[bytes, _Entry]) -> bool:
        """Write the blocks of a chain that were not written yet. Returns False if the sweep must end."""
        for digest in chain:
            if digest in swept.written:
                continue
            began = time.monotonic()
            self._room -= layout.block_bytes
            if self._room < 0 or self._stopped.is_set():
                return False
            block = _read(layout, digest, entries[digest])
            if block is None:
                # What follows it would not be found.
                return True
            if not self._disk.write(layout, digest, block, self._generation):
                return False
            swept.written.add(digest)
            self._stopped.wait(max(0.0, layout.block_bytes / BYTES_PER_SECOND - (time.monotonic() - began)))
        return True


def _tables(files: PeerFiles) -> list[Table]:
    files.refresh()
    tables = list[Table]()
    for peer in files:
        with suppress(OSError):  # Truncated or deleted meanwhile.
            tables.append((peer, peer.entries()))
    return tables


def _state(tables: list[Table]) -> State:
    # An entry becomes valid after it has got its version.
    return tuple((peer.path, crc32(_column(rows, "valid"), crc32(_column(rows, "version")))) for peer, rows in tables)


def _column(rows: NDArray[np.void], name: str) -> bytes:
    return np.ascontiguousarray(rows[name]).tobytes()


def _entries(tables: list[Table]) -> dict[bytes, _Entry]:
    """The valid entries of all files, by hash."""
    found: dict[bytes, _Entry] = {}
    for peer, rows in tables:
        hashes, parents = _column(rows, "hash"), _column(rows, "parent")
        has_parent, versions, sums = (rows[name].tolist() for name in ("has_parent", "version", "sum"))
        for block in np.flatnonzero(rows["valid"]).tolist():
            place = slice(block * HASH_BYTES, (block + 1) * HASH_BYTES)
            parent = parents[place] if has_parent[block] else None
            where = Found(peer, block, versions[block], sums[block])
            found.setdefault(hashes[place], _Entry(where, rows[block], parent))
    return found


def _read(layout: Layout, digest: bytes, entry: _Entry) -> StoredBlock | None:
    """The block, verified; None if it is no longer there or not whole."""
    try:
        data = entry.found.file.read(entry.found, digest)
    except OSError:
        return None
    # The CRC: the block belongs to this chain only if its entry is whole.
    if data is None or check_of(entry.row) != int(entry.row["check"]):
        return None
    return StoredBlock(entry.found.total, data) if _sum(layout, data) == entry.found.total else None


def _sum(layout: Layout, data: memoryview) -> int:
    """The `block_sum` of parts that are one after the other."""
    ends = accumulate(layout.parts)
    return block_sum(_words(data[end - size : end], size) for size, end in zip(layout.parts, ends, strict=True))


def _words(part: memoryview, size: int) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(part, word_of(size))

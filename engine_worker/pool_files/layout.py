"""What a pool file contains, and where.

A page with the header, then an entry for each block, then buckets that find entries by hash, then the parts: for each
tensor the same number of equally long blocks, and one more for what the owner pads with.
"""

import mmap
import os
from hashlib import blake2b
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from engine_worker.pool_files.memory import is_private

FORMAT: Final = 1
MAGIC: Final = b"SLUICEKV"
"""Written last: a file without it is not complete."""
HASH_BYTES: Final = 16
ADAPTER_BYTES: Final = 64
SIZING_BYTES: Final = 16
BUCKET: Final = 8
"""Slots of a bucket. A block whose bucket is full is not found by other engines."""
HEADER = np.dtype(
    [("magic", "S8"), ("format", "<u4"), ("starts", "<u4"), ("num_blocks", "<u8"), ("sizing", f"V{SIZING_BYTES}")]
)
"""`starts`: not 0 from an engine's taking over the file until it is ready."""


class Layout(NamedTuple):
    """What the bytes of a block mean. Only engines with the same layout read each other's files."""

    name: str
    """Backend and its version, dtype, shape of a block."""
    tokens_per_block: int
    parts: tuple[int, ...]
    """Bytes of a block in each tensor."""
    on_host: bool = False
    """Whether these are blocks of the host pool; otherwise of the device pool, on a CPU."""

    @property
    def folder(self) -> str:
        return blake2b(repr((FORMAT, mmap.PAGESIZE, self)).encode(), digest_size=8).hexdigest()

    @property
    def block_bytes(self) -> int:
        return sum(self.parts)

    @property
    def entry(self) -> np.dtype[np.void]:
        """dtype of an entry. `version` grows whenever the entry changes. `check`: CRC of the fields after it. `sum`:
        see `block_sum`."""
        return np.dtype(
            [
                ("version", "<u8"),
                ("valid", "<u8"),
                ("check", "<u8"),
                ("sum", "<u8"),
                ("hash", f"V{HASH_BYTES}"),
                ("parent", f"V{HASH_BYTES}"),
                ("has_parent", "<u4"),
                ("adapter", f"S{ADAPTER_BYTES}"),
                ("tokens", "<i4", (self.tokens_per_block,)),
            ]
        )


class Places(NamedTuple):
    """Offsets in a file of `num_blocks` blocks. Each begins at a page."""

    entries: int
    buckets: int
    num_buckets: int
    parts: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, layout: Layout, num_blocks: int) -> "Places":
        entries = mmap.PAGESIZE
        buckets = entries + in_pages(num_blocks * layout.entry.itemsize)
        # Half full buckets on average would overflow for one block of fifty, a quarter full ones for one of 4,000.
        num_buckets = -(-num_blocks // 2)
        end = buckets + in_pages(num_buckets * BUCKET * 4)
        parts = list[int]()
        for size in layout.parts:
            parts.append(end)
            end += in_pages((num_blocks + 1) * size)
        return cls(entries, buckets, num_buckets, tuple(parts), end)


def num_blocks_of(file: int, layout: Layout) -> int | None:
    """Number of blocks of a file of this layout; None if it is not complete, damaged, no pool file, or one that others
    than this user can read or write. Raises OSError."""
    data, status = os.pread(file, HEADER.itemsize, 0), os.fstat(file)
    if len(data) < HEADER.itemsize or not is_private(status):
        return None
    header = np.frombuffer(data, HEADER)[0]
    num_blocks, size = int(header["num_blocks"]), status.st_size
    # The size first, before anything is computed with a number that could be any.
    if header["magic"] != MAGIC or header["format"] != FORMAT or not 0 < num_blocks * layout.block_bytes <= size:
        return None
    return num_blocks if Places.of(layout, num_blocks).size == size else None


def in_pages(size: int) -> int:
    """Bytes of the pages that `size` bytes take."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def check_of(entry: np.void) -> int:
    """The `check` of an entry."""
    return crc32(entry.tobytes()[24:])


def bucket_of(digest: bytes, num_buckets: int) -> int:
    return int.from_bytes(digest[:8], "little") % num_buckets

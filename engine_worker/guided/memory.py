"""Memory that the engine shares with the guide worker: a header with the worker's current activity, then a mask per
slot."""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

HEADER = 64
"""Bytes of the header."""
SLOT, COMPILING = 0, 1
"""Words of the header: the slot whose mask is being computed; the number of guides that are being compiled for later
steps."""
NOTHING = -1
"""Value of the first word otherwise."""
WORD_BITS = 32


class MaskMemory:
    """`masks`: [slots, words] uint32, one bit per id."""

    def __init__(self, descriptor: int, size: int) -> None:
        """`size`: ids in a mask. Owns `descriptor`, that of an in-memory file, which may be empty."""
        self.descriptor = descriptor
        self._words = -(-size // WORD_BITS)
        self.num_slots = 0
        self._address = 0
        self._view = memoryview(b"").cast("I")
        self.masks: NDArray[np.uint32] = np.zeros((0, self._words), np.uint32)
        self.header: NDArray[np.int64] = np.full(HEADER // 8, NOTHING, np.int64)

    @classmethod
    def create(cls, size: int) -> "MaskMemory":
        return cls(os.memfd_create("guide-masks"), size)

    @property
    def mask_bytes(self) -> int:
        return 4 * self._words

    def reach(self, num_slots: int) -> None:
        """Map at least `num_slots` slots."""
        if num_slots <= self.num_slots:
            return
        num_bytes = HEADER + num_slots * self.mask_bytes
        if os.fstat(self.descriptor).st_size < num_bytes:
            os.ftruncate(self.descriptor, num_bytes)
        # The former mapping is unmapped with the last array that views it.
        mapped = mmap.mmap(self.descriptor, num_bytes)
        self.header = np.frombuffer(mapped, np.int64, HEADER // 8)
        self.masks = np.frombuffer(mapped, np.uint32, offset=HEADER).reshape(num_slots, self._words)
        self.num_slots = num_slots
        # Cached: numpy takes microseconds to compute it.
        self._address = int(self.masks.ctypes.data)
        self._view = memoryview(mapped)[HEADER:].cast("I")

    def address(self, slot: int) -> int:
        """Address of the mask of a mapped slot."""
        return self._address + slot * self.mask_bytes

    def mask(self, slot: int) -> memoryview:
        """Words of the mask of a mapped slot. Unlike a numpy array, a memoryview accesses single words fast."""
        return self._view[slot * self._words : (slot + 1) * self._words]

    def __del__(self) -> None:
        os.close(self.descriptor)

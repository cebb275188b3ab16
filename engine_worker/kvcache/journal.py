"""What changed in the prefix cache, for routers that place requests by it."""

from collections import deque
from itertools import islice
from threading import Lock

from sluice.ring.hashing import short_hash
from sluice.ring.heartbeats import CacheNews

CAPACITY = 1 << 16
"""Changes kept; whoever has not heard that much gets everything anew."""


class Journal:
    """Numbered changes, written by the engine's thread and told by another."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lock = Lock()
        self._last = 0
        self._changes: deque[tuple[int, bool]] = deque(maxlen=capacity)
        """The latest: (block, whether it is findable since)."""
        self._findable: set[int] = set()

    def store(self, digest: bytes) -> None:
        """The block with this hash can be found from now on."""
        block = short_hash(digest)
        with self._lock:
            self._findable.add(block)
            self._changes.append((block, True))
            self._last += 1

    def remove(self, digest: bytes) -> None:
        """It cannot be found any more."""
        block = short_hash(digest)
        with self._lock:
            self._findable.discard(block)
            self._changes.append((block, False))
            self._last += 1

    def clear(self) -> None:
        """Nothing can be found any more."""
        with self._lock:
            self._findable.clear()
            self._changes.clear()
            self._last += 1

    def since(self, heard: int) -> CacheNews | None:
        """What came after change number `heard`; None where nothing did. Safe in any thread."""
        with self._lock:
            last, behind = self._last, self._last - heard
            if not behind:
                return None
            if not 0 < behind <= len(self._changes):
                return CacheNews(0, last, list(self._findable), whole=True)
            news = dict(islice(self._changes, len(self._changes) - behind, None))
        stored = [block for block, findable in news.items() if findable]
        removed = [block for block, findable in news.items() if not findable]
        return CacheNews(heard, last, stored, removed)

"""The journal of findable blocks, by which routers place requests."""

from collections import deque
from itertools import islice
from threading import Lock

from sluice.wire.hashing import short_hash
from sluice.wire.heartbeats import CacheChanges

JOURNAL_CAPACITY = 1 << 16
"""Changes kept; a router that is further behind receives the full state."""


class Journal:
    """Numbered changes of the set of findable blocks, by which routers place requests. Thread-safe."""

    def __init__(self, capacity: int = JOURNAL_CAPACITY) -> None:
        self._lock = Lock()
        self._last = 0
        self._changes: deque[tuple[int, bool]] = deque(maxlen=capacity)
        """(short hash of a block, whether it became findable), the latest last."""
        self._findable: set[int] = set()

    def store(self, digest: bytes) -> None:
        self._record(short_hash(digest), findable=True)

    def remove(self, digest: bytes) -> None:
        self._record(short_hash(digest), findable=False)

    def clear(self) -> None:
        with self._lock:
            self._findable.clear()
            # Without changes every router that is behind receives the full state.
            self._changes.clear()
            self._last += 1

    def since(self, known: int) -> CacheChanges | None:
        """The changes after number `known`; the full state if they are no longer kept; None if nothing changed."""
        with self._lock:
            last, behind = self._last, self._last - known
            if not behind:
                return None
            if not 0 < behind <= len(self._changes):
                return CacheChanges(0, last, list(self._findable), whole=True)
            # Only the last change of each block counts.
            changed = dict(islice(self._changes, len(self._changes) - behind, None))
        stored = [block for block, findable in changed.items() if findable]
        removed = [block for block, findable in changed.items() if not findable]
        return CacheChanges(known, last, stored, removed)

    def _record(self, block: int, findable: bool) -> None:
        with self._lock:
            if findable:
                self._findable.add(block)
            else:
                self._findable.discard(block)
            self._changes.append((block, findable))
            self._last += 1

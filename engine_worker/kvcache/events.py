"""KV cache events: numbered changes of the prefix cache, for clients that follow them."""

from collections.abc import Iterable
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

from engine_worker.kvcache.pool import Priorities, Stored
from engine_worker.step import Content
from sluice.wire import cache_events as ring
from sluice.wire.cache_events import MAX_EVENTS, MAX_ITEMS, MAX_REMOVED, CacheEvent, Tier, size_of
from sluice.wire.hashing import short_hash


class EventSlice(NamedTuple):
    first: int
    """Number of the first event."""
    events: list[CacheEvent]


class EventLog:
    """The latest `capacity` events. Written by the engine's thread, read by any thread."""

    def __init__(self, capacity: int, num_blocks: int, num_host_blocks: int) -> None:
        self._lock = Lock()
        self._capacity = capacity
        self._ring: list[CacheEvent] = []
        """Event number n is at index n modulo capacity."""
        self._count = 0
        """Events since the start."""
        self._record(ring.Created([num_blocks, num_host_blocks]))

    def stored(self, content: Content, priority: int) -> None:
        """A block was published on the device."""
        parent = None if content.parent is None else short_hash(content.parent)
        self._record(ring.Stored(short_hash(content.hash), parent, content.tokens, priority, content.adapter))

    def moved(self, stored: Stored, target: Tier, priority: int) -> None:
        """A block was moved to `target` from the other tier. `stored`: its state before; `priority`: its new one."""
        source = Tier.HOST if target is Tier.DEVICE else Tier.DEVICE
        self._record(ring.Updated(short_hash(stored.content.hash), source, target, stored.priority, priority))

    def prioritized(self, tier: Tier, digest: bytes, priorities: Priorities) -> None:
        """The priority of a block has changed."""
        self._record(ring.Updated(short_hash(digest), tier, tier, *priorities))

    def removed(self, digests: Iterable[bytes]) -> None:
        """Blocks were removed from the prefix cache."""
        blocks = list(map(short_hash, digests))
        for start in range(0, len(blocks), MAX_REMOVED):
            self._record(ring.Removed(blocks[start : start + MAX_REMOVED]))

    def since(self, start: int) -> EventSlice:
        """The oldest events that are still kept, from number `start` on, as many as fit in one message."""
        with self._lock:
            first = min(max(start, self._count - len(self._ring)), self._count)
            end = min(self._count, first + MAX_EVENTS)
            events = [self._ring[number % self._capacity] for number in range(first, end)]
        sizes = accumulate(map(size_of, events))
        # At least one: a single event is bounded by its own limits.
        fitting = max(1, sum(size <= MAX_ITEMS for size in sizes))
        return EventSlice(first, events[:fitting])

    def _record(self, event: CacheEvent) -> None:
        with self._lock:
            if len(self._ring) < self._capacity:
                self._ring.append(event)
            else:
                self._ring[self._count % self._capacity] = event
            self._count += 1

"""Routers' requests for KV cache events: the engine's thread receives them, the heartbeat thread answers them."""

from collections.abc import Iterator
from threading import Lock

from engine_worker.kvcache.events import EventLog
from sluice.wire.cache_events import CacheEvents, ReadCacheEvents

MAX_READS = 256
"""Requests that may wait for the next heartbeat. A reader that receives no answer repeats its request."""


class EventReads:
    """Requests that wait for the next heartbeat. `put` and `take` may be called in different threads."""

    def __init__(self, events: EventLog | None, engine: str, epoch: int) -> None:
        self._events = events
        self._engine = engine
        self._epoch = epoch
        self._lock = Lock()
        self._reads: dict[int, ReadCacheEvents] = {}
        """Latest request of each reader."""

    @property
    def enabled(self) -> bool:
        """Whether this engine keeps events for users."""
        return self._events is not None

    def put(self, message: ReadCacheEvents) -> bool:
        """Add a request. False if it will not be answered: this engine keeps no events, the message is for an earlier
        process, or too many requests wait."""
        if self._events is None or message.engine_epoch != self._epoch:
            return False
        with self._lock:
            if len(self._reads) >= MAX_READS and message.reader not in self._reads:
                return False
            self._reads[message.reader] = message
        return True

    def take(self) -> Iterator[tuple[str, CacheEvents]]:
        """Remove all waiting requests and answer them: (address of the router, answer)."""
        with self._lock:
            reads, self._reads = self._reads, {}
        if self._events is None:
            return
        for reader, read in reads.items():
            first, events = self._events.since(read.start)
            yield read.router, CacheEvents(self._engine, self._epoch, reader, read.start, first, events)

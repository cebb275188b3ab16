"""Which routers want KV cache events: they ask in the engine's thread, the heartbeats' thread answers."""

from collections.abc import Iterator
from threading import Lock

from engine_worker.kvcache.events import EventLog
from sluice.ring.cache_events import CacheEvents, ReadCacheEvents

MAX_READS = 256
"""That wait for the next heartbeat. A reader without an answer asks again."""


class EventReads:
    def __init__(self, events: EventLog | None, engine: str, epoch: int) -> None:
        self._events = events
        self._engine = engine
        self._epoch = epoch
        self._lock = Lock()
        self._reads: dict[int, ReadCacheEvents] = {}
        """By reader: one that asks again replaces what it asked before."""

    @property
    def kept(self) -> bool:
        """Whether this engine keeps events."""
        return self._events is not None

    def put(self, message: ReadCacheEvents) -> bool:
        """False if it gets no answer: it was meant for another process, or there are too many."""
        if self._events is None or message.engine_epoch != self._epoch:
            return False
        with self._lock:
            if len(self._reads) >= MAX_READS and message.reader not in self._reads:
                return False
            self._reads[message.reader] = message
        return True

    def take(self) -> Iterator[tuple[str, CacheEvents]]:
        """(address of a router, answer), each once."""
        with self._lock:
            reads, self._reads = self._reads, {}
        if self._events is None:
            return
        for reader, read in reads.items():
            first, events = self._events.since(read.start)
            yield read.router, CacheEvents(self._engine, self._epoch, reader, read.start, first, events)

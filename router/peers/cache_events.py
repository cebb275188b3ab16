"""Readers of the engines' KV cache events. The router buffers nothing: each reader requests the next events itself.

The next events are requested from an engine once its last answer was read. So a slow reader misses only the oldest
events in the engine's buffer, does not affect other readers, and can tell by the numbers which events it missed.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from router.errors import Reason, RequestError, Violation, shown
from router.peers.membership import Membership
from router.peers.peers import EnginePeer
from sluice.wire.cache_events import CacheEvents, ReadCacheEvents
from sluice.wire.errors import ErrorCode
from sluice.wire.timing import HEARTBEAT_SECONDS

MAX_READERS = 64
CHECK_SECONDS = 0.1
"""Interval at which readers look for new engines."""
RETRY_SECONDS = 4 * HEARTBEAT_SECONDS
"""If no answer has arrived after this time, the request or the answer was lost. Answers come with heartbeats."""
MAX_POSITIONS = 1024
"""Engine processes whose position is remembered, most of which have ended."""


@dataclass
class _Position:
    """A reader's position in the events of one engine process."""

    next: int = 0
    """Number of the next event."""
    requested_at: float | None = None
    """Time of the pending request, by the monotonic clock; None if no answer is pending."""


class CacheEventReader:
    """Must be used by one task at a time."""

    def __init__(self, membership: Membership, address: str, engine: str) -> None:
        """`engine`: id of the engine to read from; empty for all engines."""
        self.number = secrets.randbits(63)
        self._membership = membership
        self._address = address
        self._engine = engine
        self._positions: dict[int, _Position] = {}
        """By epoch. Kept when an engine falls silent, because it may return."""
        self._answers: dict[int, CacheEvents] = {}
        """Unread answers by epoch, at most one per engine."""
        self._answered = asyncio.Event()

    def on_answer(self, answer: CacheEvents) -> None:
        position = self._positions.get(answer.engine_epoch)
        # Ignore a late answer to a request that was repeated.
        if position is None or position.requested_at is None or answer.start != position.next:
            return
        position.requested_at = None
        position.next = max(answer.start, answer.first + len(answer.events))
        if answer.events:
            self._answers[answer.engine_epoch] = answer
            self._answered.set()

    async def next(self) -> CacheEvents:
        """The next events of one engine, at least one event."""
        while not self._answers:
            self._request_events()
            self._answered.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), CHECK_SECONDS)
        epoch = next(iter(self._answers))
        return self._answers.pop(epoch)

    def check(self) -> None:
        """Raises RequestError INVALID_ARGUMENT if engines are alive, but none has the chosen id or none of the chosen
        ones records events."""
        engines = self._membership.engines.alive
        chosen = [engine for engine in engines if self._engine in ("", engine.name)]
        if engines and not chosen:
            names = ", ".join(sorted(engine.name for engine in engines))
            violation = Violation(
                "engine_id",
                f"is {shown(self._engine)}, must be empty or one of {shown(names)}",
                reason=Reason.UNKNOWN_VALUE,
            )
            raise RequestError.invalid([violation])
        if chosen and not any(map(_records_events, chosen)):
            names = ", ".join(sorted(engine.name for engine in chosen))
            description = (
                f"{shown(names)} records no events: the engine's setting kv_event_buffer is 0; start the ring with "
                "sluice serve --set engine.kv_event_buffer=10000"
            )
            raise RequestError.at("engine_id", description)

    def _request_events(self) -> None:
        now = time.monotonic()
        for engine in self._membership.engines.alive:
            if self._engine not in ("", engine.name) or not _records_events(engine):
                continue
            position = self._position(engine.epoch)
            if position.requested_at is not None and now - position.requested_at < RETRY_SECONDS:
                continue
            message = ReadCacheEvents(engine.epoch, self._address, self.number, position.next)
            # If the lane is full, the next check tries again.
            position.requested_at = now if engine.lane.send(message) else None

    def _position(self, epoch: int) -> _Position:
        if epoch not in self._positions and len(self._positions) >= MAX_POSITIONS:
            del self._positions[next(iter(self._positions))]
        return self._positions.setdefault(epoch, _Position())


class CacheEventReaders:
    def __init__(self, membership: Membership, address: str) -> None:
        """`address`: address of this router's inbox."""
        self._membership = membership
        self._address = address
        self._readers: dict[int, CacheEventReader] = {}
        """By number."""

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def open(self, engine: str) -> Iterator[CacheEventReader]:
        """A reader of the engine with this id, or of all engines if `engine` is empty.

        Raises RequestError INVALID_ARGUMENT, or OVERLOADED if too many readers are open.
        """
        if len(self._readers) >= MAX_READERS:
            raise RequestError(ErrorCode.OVERLOADED, f"{MAX_READERS} StreamCacheEvents calls are open, the limit")
        reader = CacheEventReader(self._membership, self._address, engine)
        reader.check()
        self._readers[reader.number] = reader
        try:
            yield reader
        finally:
            del self._readers[reader.number]

    def on_answer(self, answer: CacheEvents) -> None:
        """Pass an answer to its reader. Ignored if the reader has been closed."""
        reader = self._readers.get(answer.reader)
        if reader is not None:
            reader.on_answer(answer)


def _records_events(engine: EnginePeer) -> bool:
    return engine.heartbeat is not None and engine.heartbeat.cache_events

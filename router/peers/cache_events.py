"""Readers of the KV cache events that engines keep. Nothing is kept here: each reader asks engines for what comes next.

An engine is asked again once its last answer was read. So a slow reader misses no more than the oldest events
of the engine's buffer, affects no other reader, and sees by the numbers which events it missed.
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
from sluice.ring.cache_events import CacheEvents, ReadCacheEvents
from sluice.ring.errors import ErrorCode
from sluice.ring.timing import HEARTBEAT_SECONDS

MAX_READERS = 64
CHECK_SECONDS = 0.1
"""Interval at which readers check which engines there are."""
ASK_AGAIN_SECONDS = 4 * HEARTBEAT_SECONDS
"""Without an answer, which comes with a heartbeat: the question or the answer was lost."""
MAX_POSITIONS = 1024
"""Of engine processes, most of them of the past."""


@dataclass
class _Position:
    """Of a reader in the events of one engine process."""

    next: int = 0
    asked_at: float | None = None
    """On the monotonic clock; None: no answer is awaited."""


class CacheEventReader:
    """Has one user at a time."""

    def __init__(self, membership: Membership, address: str, engine: str) -> None:
        """`engine`: its id; empty: all engines."""
        self.number = secrets.randbits(63)
        self._membership = membership
        self._address = address
        self._engine = engine
        self._positions: dict[int, _Position] = {}
        """By epoch. One that fell silent may come back, so it is kept."""
        self._answers: dict[int, CacheEvents] = {}
        """At most one of each engine, by epoch."""
        self._answered = asyncio.Event()

    def on_answer(self, answer: CacheEvents) -> None:
        position = self._positions.get(answer.engine_epoch)
        # A late answer to a question that was repeated is not awaited any more.
        if position is None or position.asked_at is None or answer.start != position.next:
            return
        position.asked_at = None
        position.next = max(answer.start, answer.first + len(answer.events))
        if answer.events:
            self._answers[answer.engine_epoch] = answer
            self._answered.set()

    async def next(self) -> CacheEvents:
        """The next events of an engine, at least one."""
        while not self._answers:
            self._ask()
            self._answered.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), CHECK_SECONDS)
        epoch = next(iter(self._answers))
        return self._answers.pop(epoch)

    def check(self) -> None:
        """Raises RequestError INVALID_ARGUMENT if engines are alive, and none of them is the one, or keeps events."""
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
        if chosen and not any(map(_keeps_events, chosen)):
            names = ", ".join(sorted(engine.name for engine in chosen))
            description = f"no events are kept by {shown(names)}: the engine's setting kv_event_buffer is 0"
            raise RequestError.invalid([Violation("engine_id", description)])

    def _ask(self) -> None:
        now = time.monotonic()
        for engine in self._membership.engines.alive:
            if self._engine not in ("", engine.name) or not _keeps_events(engine):
                continue
            position = self._position(engine.epoch)
            if position.asked_at is not None and now - position.asked_at < ASK_AGAIN_SECONDS:
                continue
            message = ReadCacheEvents(engine.epoch, self._address, self.number, position.next)
            # A full lane is tried again at the next look.
            position.asked_at = now if engine.lane.send(message) else None

    def _position(self, epoch: int) -> _Position:
        if epoch not in self._positions and len(self._positions) >= MAX_POSITIONS:
            del self._positions[next(iter(self._positions))]
        return self._positions.setdefault(epoch, _Position())


class CacheEventReaders:
    def __init__(self, membership: Membership, address: str) -> None:
        """`address`: of this router's inbox."""
        self._membership = membership
        self._address = address
        self._readers: dict[int, CacheEventReader] = {}

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def open(self, engine: str) -> Iterator[CacheEventReader]:
        """`engine`: its id; empty: all. Raises RequestError INVALID_ARGUMENT, and OVERLOADED if too many are open."""
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
        """Of a reader that has gone: ignored."""
        reader = self._readers.get(answer.reader)
        if reader is not None:
            reader.on_answer(answer)


def _keeps_events(engine: EnginePeer) -> bool:
    return engine.heartbeat is not None and engine.heartbeat.cache_events

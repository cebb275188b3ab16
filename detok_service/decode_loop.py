"""Which streams have something to decode, and when: the work of one look into the inbox."""

from collections import Counter, deque
from collections.abc import Callable

import structlog

from detok_service.router_links import RouterLinks
from detok_service.stream import Engine, Stream
from detok_service.table import Table
from sluice.ring.errors import ErrorCode

REPLAY_SECONDS = 0.02
"""Time for resumed tokens between two looks into the inbox."""
REPLAY_TOKENS = 1024
"""Resumed tokens that one stream reads before the next one may."""


class Decoding:
    """Takes streams from the table to their outlets."""

    def __init__(
        self, table: Table, outlets: RouterLinks, log: structlog.stdlib.BoundLogger, clock: Callable[[], float]
    ) -> None:
        self.touched: list[Stream] = []
        """Streams with queued tokens; each marked so, and once."""
        self.failed: Counter[str] = Counter()
        """Streams that this end gave up, by error code."""
        self.dropped = 0
        """Streams whose attempt was given up by its router."""
        self._table = table
        self._outlets = outlets
        self._log = log
        self._clock = clock
        self._replays: deque[Stream] = deque()
        """Streams that are to read resumed tokens first; marked as touched, but on this list instead."""
        self._given_up: dict[int, int] = {}
        """By request, the last attempt given up; since the last flush."""

    @property
    def replaying(self) -> bool:
        """Whether there is work even if nothing comes."""
        return bool(self._replays)

    def add(self, stream: Stream) -> None:
        """A stream begins."""
        self._table.add(stream)
        if stream.replaying:
            stream.touched = True
            self._replays.append(stream)

    def advance(self, now: float) -> None:
        """Decode what is queued."""
        touched = self.touched.copy()
        self.touched.clear()
        outlets = self._outlets.by_address
        for stream in touched:
            stream.touched = False
            try:
                due = stream.advance(now)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this stream only
                self._fail_text(stream, error)
                continue
            if due:
                outlets[stream.router].add(stream)
                if stream.end is not None:
                    self._table.close(stream)

    def replay(self, now: float) -> None:
        """Read resumed tokens, each stream a slice in turn, for so long that nobody else waits long."""
        until = self._clock() + REPLAY_SECONDS
        while self._replays and self._clock() < until:
            stream = self._replays.popleft()
            if self._table.live.get(stream.key) is not stream:
                continue
            try:
                stream.replay(REPLAY_TOKENS, now)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail_text(stream, error)
                continue
            (self._replays if stream.replaying else self.touched).append(stream)
        self.advance(now)

    def drop(self, request: int, attempt: int, now: float) -> None:
        """Nobody wants to hear of this request's attempts up to this one any more."""
        self.advance(now)
        self.dropped += self._table.give_up(request, attempt)
        self._given_up[request] = max(attempt, self._given_up.get(request, attempt))

    def lose(self, engine: Engine, code: ErrorCode, message: str, now: float) -> None:
        """End the streams of an engine, after what has come of them."""
        self.advance(now)
        for stream in self._table.of_engine(engine):
            self.fail(stream, code, message)

    def lose_router(self, address: str, now: float) -> None:
        """End the streams to a router whose place another one took. Should one be the new one's, it learns of it."""
        self.advance(now)
        for stream in self._table.of_router(address):
            self.fail(stream, ErrorCode.ROWS_LOST, "the router has been started again")

    def fail(self, stream: Stream, code: ErrorCode, message: str) -> None:
        """End a stream that is not touched."""
        stream.fail(code, message)
        self.failed[code.name] += 1
        self._outlets.add(stream)
        self._table.close(stream)

    def flush(self) -> None:
        """Send what lanes take."""
        if self._given_up:
            self._outlets.forget(self._given_up)
            self._given_up.clear()
        self._outlets.flush()

    def _fail_text(self, stream: Stream, error: Exception) -> None:
        request, _, sequence = stream.key
        self._log.error("text_failed", request=request, sequence=sequence, exc_info=error)
        self.fail(stream, ErrorCode.TEXT_FAILED, f"decoding raised {type(error).__name__}")

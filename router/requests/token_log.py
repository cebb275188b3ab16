"""What has come of a request, sequence by sequence: an append-only log with one reader, the answer's coroutine."""

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence
from enum import Enum

from router.errors import RequestError
from sluice.ring.errors import FinishReason
from sluice.ring.wire import End, Started, TextRow, Times, TokenLogprob

NO_TIMES = Times(0.0, 0.0, 0.0)


class Appended(Enum):
    """What became of a row."""

    TAKEN = 0
    SEEN = 1
    """Every token of it had come before."""
    HOLE = 2
    """Tokens before it are missing."""


class SequenceLog:
    """One sequence: every token that has come, and what the reader has not taken yet."""

    __slots__ = ("cumulative", "end", "heard_at", "ids", "index", "listed", "logprobs", "received", "taken", "text")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids = array("q")
        """Every token of the continuation, until it has ended and all of it was taken."""
        self.received = 0
        """Tokens."""
        self.taken = 0
        """Tokens the reader has taken, or had before."""
        self.text: list[str] = []
        """Not taken yet."""
        self.logprobs: list[TokenLogprob] = []
        """Likewise."""
        self.cumulative = 0.0
        self.end: End | None = None
        self.heard_at: float | None = None
        """When its latest tokens came, on the monotonic clock."""
        self.listed = False

    @property
    def untaken(self) -> "array[int]":
        """Tokens the reader has not taken."""
        return self.ids[self.taken :]

    def forget(self) -> None:
        """Keep only the counts."""
        self.ids, self.text, self.logprobs = array("q"), [], []


class RequestLog:
    """All n sequences. Rows come in by `append`; the reader waits with `changed` and walks `news`."""

    def __init__(self, n: int) -> None:
        self.sequences = [SequenceLog(i) for i in range(n)]
        self.started: Started | None = None
        self.start_told = False
        """The caller has been told of `started`."""
        self.fault: RequestError | None = None
        self.news: deque[SequenceLog] = deque()
        self.received = 0
        """Tokens of all sequences that have come over the ring."""
        self.undelivered = 0
        """Of those, what the reader has not taken."""
        self._unfinished = n
        self._reader: asyncio.Future[None] | None = None
        self._catching_up: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def complete(self) -> bool:
        """Every sequence has its end."""
        return self._unfinished == 0

    @property
    def open(self) -> bool:
        """Somebody waits for more of it."""
        return not (self._closed or self.complete or self.fault is not None)

    @property
    def resume(self) -> dict[int, list[int]]:
        """What another attempt goes on after, by sequence."""
        return {log.index: log.ids.tolist() for log in self.sequences if log.end is None and log.ids}

    @property
    def ended(self) -> list[int]:
        """Sequences that another attempt leaves out."""
        return [log.index for log in self.sequences if log.end is not None]

    def bring(self, index: int, ids: Sequence[int]) -> None:
        """The caller has these tokens already."""
        log = self.sequences[index]
        log.ids.extend(ids)
        log.received = log.taken = len(ids)

    def start(self, started: Started) -> None:
        """The engine has begun; only the first such news counts."""
        if self.started is None:
            self.started = started
            self._wake()

    def forget_start(self) -> None:
        """The attempt that began has brought nothing: the next one's start counts, unless the caller knows of this."""
        if not self.received and not self.start_told:
            self.started = None

    def append(self, row: TextRow) -> Appended:
        """Take a row whose sequence is one of this request's. After a fault nothing is: its end may be by our hand."""
        log = self.sequences[row.sequence]
        if self._closed or self.fault is not None or log.end is not None:
            return Appended.SEEN
        count = len(row.tokens)
        if row.offset != log.received or self.started is None:
            # A row that begins before and ends after what has come cannot be cut: its text is not per token.
            seen = row.offset + count <= log.received and self.started is not None and row.end is None
            return Appended.SEEN if seen else Appended.HOLE
        log.received += count
        self.received += count
        self.undelivered += count
        log.ids.extend(row.tokens)
        if row.text:
            log.text.append(row.text)
        for logprob in row.logprobs:
            log.logprobs.append(logprob)
            log.cumulative += logprob.logprob
        if row.end is not None:
            self._end(log, row.end)
        self._list(log)
        self._wake()
        return Appended.TAKEN

    def take(self, log: SequenceLog) -> None:
        """The reader has taken all that came of this sequence."""
        self.undelivered -= log.received - log.taken
        log.taken = log.received
        log.text.clear()
        log.logprobs.clear()
        if log.end is not None:
            log.forget()
        self._note_progress()

    def behind(self, most: int) -> bool:
        """Whether the reader is busy with a write, and more than so many tokens wait for it."""
        return self.undelivered > most and self._reader is None

    def finish(self, reason: FinishReason) -> None:
        """End what has not ended, here and now: the ring has nothing more to say."""
        for log in self.sequences:
            if log.end is None and self.open:
                self._end(log, End(reason, NO_TIMES))
                self._list(log)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """The request ends with an error; the first one counts, and none after its good end."""
        if self.open:
            self.fault = error
            self._wake()

    def close(self) -> None:
        """The reader has gone: keep nothing more."""
        self._closed = True
        self.news.clear()
        for log in self.sequences:
            log.forget()

    async def changed(self) -> None:
        """Wait for the next change. Call it only after everything so far has been looked at."""
        self._reader = asyncio.get_running_loop().create_future()
        self._note_progress()
        try:
            await self._reader
        finally:
            self._reader = None

    async def caught_up(self, most: int) -> None:
        """Wait until the reader has at most so many tokens before it, or has taken all that can be shown yet."""
        while self.behind(most):
            self._catching_up = asyncio.get_running_loop().create_future()
            try:
                await self._catching_up
            finally:
                self._catching_up = None

    def _end(self, log: SequenceLog, end: End) -> None:
        log.end = end
        self._unfinished -= 1

    def _list(self, log: SequenceLog) -> None:
        if not log.listed:
            log.listed = True
            self.news.append(log)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _note_progress(self) -> None:
        if self._catching_up is not None and not self._catching_up.done():
            self._catching_up.set_result(None)

"""What has come of a request, sequence by sequence: an append-only log with one reader, the answer's coroutine."""

import asyncio
from collections import deque
from enum import Enum

from router.errors import RequestError
from sluice.ring.errors import FinishReason
from sluice.ring.wire import End, Started, TextRow, Times, TokenLogprob


class Appended(Enum):
    """What became of a row."""

    TAKEN = 0
    SEEN = 1
    """Every token of it had come before."""
    HOLE = 2
    """Tokens before it are missing."""


class SequenceLog:
    """One sequence: what has arrived, and of that what the reader has not taken yet."""

    __slots__ = ("cumulative", "end", "heard_at", "index", "listed", "logprobs", "received", "taken", "text", "tokens")

    def __init__(self, index: int) -> None:
        self.index = index
        self.received = 0
        """Tokens."""
        self.taken = 0
        """Tokens the reader has taken."""
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.cumulative = 0.0
        self.end: End | None = None
        self.heard_at: float | None = None
        """When its latest tokens came, on the monotonic clock."""
        self.listed = False


class RequestLog:
    """All n sequences. Rows come in by `append`; the reader waits with `changed` and walks `news`."""

    def __init__(self, n: int, keep_ids: bool) -> None:
        self.sequences = [SequenceLog(i) for i in range(n)]
        self.started: Started | None = None
        self.fault: RequestError | None = None
        self.news: deque[SequenceLog] = deque()
        self._keep_ids = keep_ids
        self._unfinished = n
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def complete(self) -> bool:
        """Every sequence has its end."""
        return self._unfinished == 0

    def start(self, started: Started) -> None:
        """The engine has begun; only the first such news counts."""
        if self.started is None:
            self.started = started
            self._wake()

    def append(self, row: TextRow) -> Appended:
        """Take a row whose sequence is one of this request's."""
        log = self.sequences[row.sequence]
        if self._closed or log.end is not None:
            return Appended.SEEN
        count = len(row.tokens)
        if row.offset != log.received or self.started is None:
            # A row that begins before and ends after what has come cannot be cut: its text is not per token.
            seen = row.offset + count <= log.received and self.started is not None
            return Appended.SEEN if seen else Appended.HOLE
        log.received += count
        if row.text:
            log.text.append(row.text)
        if self._keep_ids:
            log.tokens += row.tokens
        for logprob in row.logprobs:
            log.logprobs.append(logprob)
            log.cumulative += logprob.logprob
        if row.end is not None:
            self._end(log, row.end)
        self._list(log)
        self._wake()
        return Appended.TAKEN

    def finish(self, reason: FinishReason) -> None:
        """End what has not ended, here and now: the ring has nothing more to say."""
        for log in self.sequences:
            if log.end is None and not self._closed:
                self._end(log, End(reason, Times(0.0, 0.0, 0.0)))
                self._list(log)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """The request ends with an error; the first one counts, and none after its good end."""
        if self.fault is None and not self.complete and not self._closed:
            self.fault = error
            self._wake()

    def close(self) -> None:
        """The reader has gone: keep nothing more."""
        self._closed = True
        self.news.clear()
        for log in self.sequences:
            log.text, log.tokens, log.logprobs = [], [], []

    async def changed(self) -> None:
        """Wait for the next change. Call it only after everything so far has been looked at."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

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

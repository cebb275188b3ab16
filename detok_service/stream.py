"""One sequence of one attempt: takes rows of tokens, gives rows of text."""

import msgspec

from detok_service.decoder import Decoder
from detok_service.stops import StopSearch
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.wire import End, Open, Times, TokenLogprob

MAX_TEXTLESS = 64
"""Tokens that wait for their text at most."""

Key = tuple[int, int, int]
"""Request, attempt, sequence."""
Engine = tuple[str, int]
"""Name and epoch."""
Row = tuple[Key, int, list[int], list[TokenLogprob], str, End | None]
"""A `TextRow` as a plain tuple, made in a third of the time: key, offset, tokens, logprobs, text, end."""
NEVER = 1 << 62
BY_TOKEN = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH})
"""Ends that a token brings, in one row with it."""


class Stream:
    """Rows go in by `take` and are only queued, so a backlog is joined; `advance` decodes them; `row` gives the result.

    What has been decoded waits in the stream until it is asked for, joined with what comes after it. After its end
    (`end` is set) a stream is given nothing more.

    What is shown after n tokens depends on these n tokens alone, and on nothing else that came or was sent; what only
    an end lets out comes with that end (`End.held`). So a stream that resumes reads the tokens that its caller has in
    silence (`replay`), and goes on as if it had shown them.
    """

    __slots__ = (
        "_decoded", "_decoder", "_first", "_interval", "_last", "_logprobs", "_offset", "_opened", "_params",
        "_queue_time", "_replayed", "_resumed", "_stops", "_text", "_tokens",
        "complete", "end", "engine", "key", "listed", "router", "touched",
    )  # fmt: skip

    def __init__(
        self,
        opened: Open,
        sequence: int,
        engine: Engine,
        decoder: Decoder,
        stops: StopSearch | None,
        now: float,
    ) -> None:
        self.key: Key = (opened.request, opened.attempt, sequence)
        self.router = opened.router
        self.engine = engine
        self.complete = False
        """The engine's own terminal has come."""
        self.end: End | None = None
        """This stream's terminal, once it is decided."""
        self.touched = False
        """The service has it on its list of streams with tokens to decode."""
        self.listed = False
        """Its outlet has it on its list of streams with a row to send."""
        self._params = opened.text
        self._interval = opened.text.interval or NEVER
        self._decoder = decoder
        self._stops = stops
        self._resumed = opened.resume.get(sequence, [])
        """What the caller has; nothing any more once the last of it has been read."""
        self._replayed = 0
        """How many of these have been read."""
        self._offset = len(self._resumed)
        """Of the first token that waits:"""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._decoded = 0
        """How many of the waiting tokens have been decoded, to:"""
        self._text = ""
        self._last: End | None = None
        """End that follows the waiting tokens."""
        self._opened = now
        self._queue_time = opened.queue
        self._first: float | None = None
        """When the first token was decoded."""

    def take(self, offset: int, tokens: list[int], logprobs: list[TokenLogprob], end: End | None) -> None:
        """Queue a row. Tokens seen before are dropped; a hole ends the stream after what came before it."""
        if end is not None:
            self.complete = True
        if self._last is not None:
            return
        seen = self._offset + len(self._tokens)
        if offset != seen:
            if offset > seen:
                self._last = _failed(ErrorCode.ROWS_LOST, f"tokens {seen} to {offset - 1} never came")
                return
            tokens = tokens[seen - offset :]
            logprobs = logprobs[seen - offset :]
        if logprobs or self._logprobs:
            if len(self._logprobs) + len(logprobs) != len(self._tokens) + len(tokens):
                self._last = _failed(ErrorCode.ROWS_LOST, f"some tokens around {seen} came without log-probabilities")
                return
            self._logprobs += logprobs
        self._tokens += tokens
        self._last = end

    @property
    def replaying(self) -> bool:
        """`replay` comes before `advance`. The last resumed token is not for it, but read when a row comes."""
        return self.end is None and self._replayed + 1 < len(self._resumed)

    def replay(self, count: int, now: float) -> None:
        """Read so many of the resumed tokens. Raises whatever the decoder raises: `fail` then."""
        start = self._replayed
        self._replayed = min(start + count, len(self._resumed) - 1)
        self._reread(self._resumed[start : self._replayed], start, now)

    def advance(self, now: float) -> bool:
        """Decode what is queued; whether there is a row to send. Raises whatever the decoder raises: `fail` then."""
        if self._resumed and not self._end_replay(now):
            return self.end is not None
        tokens = self._tokens
        if self._decoded:
            tokens = tokens[self._decoded :]
        if self._stops is None and self._last is None:
            text = self._text = self._text + self._decoder.feed(tokens)
        else:
            text = self._text = self._text + self._read(tokens, now)
        count = self._decoded = len(self._tokens)
        return (count >= self._interval and (text != "" or count >= MAX_TEXTLESS)) or self.end is not None

    def fail(self, code: ErrorCode, message: str) -> None:
        """End now; what was decoded is still sent, what is queued is dropped."""
        self._cut(self._decoded)
        self.end = _failed(code, message)

    def row(self) -> Row:
        """Take what is to be sent. To be called when nothing is queued."""
        offset, tokens, logprobs, text = self._offset, self._tokens, self._logprobs, self._text
        self._offset = offset + len(tokens)
        self._tokens = []
        self._decoded = 0
        self._text = ""
        if logprobs:
            self._logprobs = []
        return self.key, offset, tokens, logprobs, text, self.end

    def _end_replay(self, now: float) -> bool:
        """Read the last resumed token once it is known what follows it; whether the stream goes on."""
        if self.end is not None or (not self._tokens and self._last is None):
            return False
        last, self._resumed = self._resumed[-1:], []
        if not self._tokens and self._last is not None and self._last.reason in BY_TOKEN:
            # That token was the end: its row has brought all of the text, what was held back too.
            self._read(last, now)
        else:
            self._reread(last, self._offset - 1, now)
        return self.end is None

    def _reread(self, tokens: list[int], start: int, now: float) -> None:
        """Resumed tokens from number `start` on: their text has been shown."""
        if self._stops is None:
            self._decoder.feed(tokens)
            return
        self._search(self._stops, tokens, start)
        if self._stops.found is not None:
            self._cut(0)
            self.end = self._stopped(self._stops.found, now)

    def _read(self, tokens: list[int], now: float) -> str:
        """Text of the latest tokens, where they can end the stream."""
        if self._first is None and tokens:
            self._first = now
        start = self._offset + len(self._tokens) - len(tokens)
        last = self._last
        if last is not None and last.reason is FinishReason.STOP_TOKEN and not self._params.include_stop:
            tokens = tokens[:-1]
        if self._stops is None:
            text = self._decoder.feed(tokens)
        else:
            text, end = self._search(self._stops, tokens, start)
            if self._stops.found is not None:
                self._cut(end - self._offset)
                self.end = self._stopped(self._stops.found, now)
        if self.end is None and last is not None:
            self.end = last
            if last.reason in BY_TOKEN:
                text += self._flush(now)
            elif last.reason is not FinishReason.ERROR:
                # Apart: whoever loses this end goes on after the same tokens, where other text may follow.
                held = self._flush(now)
                self.end = msgspec.structs.replace(self.end, held=held)
        return text

    def _search(self, stops: StopSearch, tokens: list[int], start: int) -> tuple[str, int]:
        """Text of the tokens from number `start` on, and where it ends: after them, or after the one with a stop."""
        shown = []
        feed = self._decoder.feed
        short = self._params.min_tokens - start
        for count, token in enumerate(tokens, 1):
            shown.append(stops.feed(feed((token,)), count >= short))
            if stops.found is not None:
                return "".join(shown), start + count
        return "".join(shown), start + len(tokens)

    def _flush(self, now: float) -> str:
        text = self._decoder.flush()
        if self._stops is None:
            return text
        shown = self._stops.feed(text, self._offset + len(self._tokens) >= self._params.min_tokens)
        if self._stops.found is not None:
            self.end = self._stopped(self._stops.found, now)
        return shown + self._stops.flush()

    def _cut(self, count: int) -> None:
        """Keep so many of the waiting tokens."""
        del self._tokens[count:]
        del self._logprobs[count:]

    def _stopped(self, stop: str, now: float) -> End:
        """The engine's times where its terminal is at hand; else the queue time it told and our own clock."""
        if self._last is not None:
            times = self._last.times
        else:
            first = now if self._first is None else self._first
            times = Times(self._queue_time, first - self._opened, now - first)
        return End(FinishReason.STOP_STRING, times, stop_string=stop)


def _failed(code: ErrorCode, message: str) -> End:
    return End(FinishReason.ERROR, Times(0.0, 0.0, 0.0), fault=Fault(code.name, message))

"""One sequence of one attempt: rows of tokens in, rows of text out."""

import msgspec

from detok_service.decoders import Decoder
from detok_service.stops import StopSearch
from sluice.wire.errors import CONTINUED, ErrorCode, Fault, FinishReason
from sluice.wire.rows import End, Open, Times, TokenLogprob

MAX_TEXTLESS = 64
"""Tokens after which a row is sent even without text: the router needs their ids to resume the stream after a loss."""

Key = tuple[int, int, int]
"""(request, attempt, sequence)"""
Engine = tuple[str, int]
"""(name, epoch)"""
Row = tuple[Key, int, list[int], list[TokenLogprob], str, End | None]
"""A `TextRow` as a plain tuple, which is three times as fast to build: key, offset, tokens, logprobs, text, end."""
NEVER = 1 << 62
BY_TOKEN = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH})
"""Finish reasons that are sent in the same row as the token that ended the sequence."""


def _by_token(end: End) -> bool:
    return end.reason in BY_TOKEN and not end.by_guide


class TextStream:
    """`ingest` queues rows, `advance` decodes all queued rows together, and `row` returns the result.

    Decoded text accumulates in the stream until `row` is called. Once `end` is set, nothing more is added.

    Invariant: the text shown after n tokens depends on these n tokens alone. Text that is released only by the end of
    the sequence is sent with that end (`End.held`). So a resumed stream decodes the tokens that its caller already has
    without output (`replay`), then continues as if it had shown their text.
    """

    __slots__ = (
        "_decoded", "_decoder", "_first", "_interval", "_last", "_logprobs", "_offset", "_opened", "_params",
        "_queue_time", "_replayed", "_resumed", "_stops", "_text", "_tokens",
        "accepted", "complete", "end", "engine", "in_link", "key", "queued", "router",
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
        self.accepted = 0
        """Draft tokens accepted since the last row."""
        self.complete = False
        """Whether the engine's terminal row has arrived."""
        self.end: End | None = None
        """This stream's terminal, once it is decided."""
        self.queued = False
        """Whether the decode loop lists this stream as one with tokens to decode."""
        self.in_link = False
        """Whether the router link lists this stream as one with a row to send."""
        self._params = opened.text
        self._interval = opened.text.interval or NEVER
        self._decoder = decoder
        self._stops = stops
        self._resumed = opened.resume.get(sequence, [])
        """Tokens that the caller already has; cleared once the last of them has been decoded."""
        self._replayed = 0
        """Number of resumed tokens that have been decoded."""
        self._offset = len(self._resumed)
        """Index in the continuation of the first waiting token."""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._decoded = 0
        """Number of waiting tokens that have been decoded into `_text`."""
        self._text = ""
        self._last: End | None = None
        """The end that follows the waiting tokens."""
        self._opened = now
        self._queue_time = opened.queue
        self._first: float | None = None
        """Time at which the first token was decoded."""

    def ingest(self, offset: int, tokens: list[int], logprobs: list[TokenLogprob], end: End | None) -> None:
        """Queue a row. Known tokens are dropped; a gap ends the stream with ROWS_LOST, after the tokens before it."""
        if end is not None:
            self.complete = True
        # Rows after the end, or after a gap, are ignored.
        if self._last is not None:
            return
        seen = self._offset + len(self._tokens)
        if offset != seen:
            if offset > seen:
                self._last = _failed(ErrorCode.ROWS_LOST, f"tokens {seen} to {offset - 1} were never received")
                return
            tokens = tokens[seen - offset :]
            logprobs = logprobs[seen - offset :]
        if logprobs or self._logprobs:
            if len(self._logprobs) + len(logprobs) != len(self._tokens) + len(tokens):
                message = f"log-probabilities of some tokens around {seen} were never received"
                self._last = _failed(ErrorCode.ROWS_LOST, message)
                return
            self._logprobs += logprobs
        self._tokens += tokens
        self._last = end

    @property
    def replaying(self) -> bool:
        """Whether `replay` must be called before `advance`."""
        # The last resumed token is decoded with the next row, because an end may follow it.
        return self.end is None and self._replayed + 1 < len(self._resumed)

    def replay(self, count: int, now: float) -> None:
        """Decode the next `count` resumed tokens. Any exception of the decoder is passed on: call `fail` then."""
        start = self._replayed
        self._replayed = min(start + count, len(self._resumed) - 1)
        self._reread(self._resumed[start : self._replayed], start, now)

    def advance(self, now: float) -> bool:
        """Decode the queued rows. Returns whether a row is due. Any exception of the decoder is passed on: call `fail`
        then."""
        if self._resumed and not self._end_replay(now):
            return self.end is not None
        tokens = self._tokens
        if self._decoded:
            tokens = tokens[self._decoded :]
        # The usual case: without stop strings and without an end, nothing can end the stream here.
        if self._stops is None and self._last is None:
            text = self._text = self._text + self._decoder.feed(tokens)
        else:
            text = self._text = self._text + self._read(tokens, now)
        count = self._decoded = len(self._tokens)
        return (count >= self._interval and (text != "" or count >= MAX_TEXTLESS)) or self.end is not None

    def fail(self, code: ErrorCode, message: str) -> None:
        """End the stream with an error. Decoded text is still sent; queued tokens are dropped."""
        self._cut(self._decoded)
        self.end = _failed(code, message)

    def row(self) -> Row:
        """Return everything not yet sent, and clear it. Nothing may be queued."""
        offset, tokens, logprobs, text = self._offset, self._tokens, self._logprobs, self._text
        self._offset = offset + len(tokens)
        self._tokens = []
        self._decoded = 0
        self._text = ""
        if logprobs:
            self._logprobs = []
        return self.key, offset, tokens, logprobs, text, self.end

    def _end_replay(self, now: float) -> bool:
        """Decode the last resumed token once it is known what follows it. Returns whether the stream continues."""
        if self.end is not None or (not self._tokens and self._last is None):
            return False
        last, self._resumed = self._resumed[-1:], []
        if not self._tokens and self._last is not None and _by_token(self._last):
            # That token was the end, so its row has already shown the whole text, including text that was held back.
            self._read(last, now)
        else:
            self._reread(last, self._offset - 1, now)
        return self.end is None

    def _reread(self, tokens: list[int], start: int, now: float) -> None:
        """Decode resumed tokens, of which the first has index `start`. Their text has already been shown."""
        if self._stops is None:
            self._decoder.feed(tokens)
            return
        self._search(self._stops, tokens, start)
        if self._stops.matched is not None:
            self._cut(0)
            self.end = self._stopped(self._stops.matched, now)

    def _read(self, tokens: list[int], now: float) -> str:
        """Text of the latest tokens, up to a stop string or the end."""
        if self._first is None and tokens:
            self._first = now
        start = self._offset + len(self._tokens) - len(tokens)
        last = self._last
        if last is not None and self._hides(last):
            tokens = tokens[:-1]
        if self._stops is None:
            text = self._decoder.feed(tokens)
        else:
            text, end = self._search(self._stops, tokens, start)
            if self._stops.matched is not None:
                self._cut(end - self._offset)
                self.end = self._stopped(self._stops.matched, now)
        if self.end is None and last is not None:
            self.end = last
            if _by_token(last):
                text += self._flush(now)
            elif last.reason not in CONTINUED:
                # Sent separately: if this end is lost, the stream resumes after the same tokens, and the text that
                # follows may differ.
                held = self._flush(now)
                self.end = msgspec.structs.replace(self.end, held=held)
        return text

    def _hides(self, end: End) -> bool:
        """Whether the last token, which caused this end, has no text."""
        if self._params.include_stop or end.by_guide:
            return False
        if end.reason is FinishReason.STOP_TOKEN:
            return True
        return end.reason is FinishReason.EOS and self._params.skip_special_tokens

    def _search(self, stops: StopSearch, tokens: list[int], start: int) -> tuple[str, int]:
        """Text of `tokens`, which begin at index `start`, up to a stop string; and the index after the last token
        used."""
        shown = []
        feed, marks = self._decoder.feed, stops.marks
        short = self._params.min_tokens - start
        for count, token in enumerate(tokens, 1):
            if token in marks:
                # The text that waits for the rest of a character precedes the token.
                shown.append(stops.feed(self._decoder.flush(), count >= short))
                if stops.matched is None:
                    shown.append(stops.feed_mark(marks[token], count >= short))
            else:
                shown.append(stops.feed(feed((token,)), count >= short))
            if stops.matched is not None:
                return "".join(shown), start + count
        return "".join(shown), start + len(tokens)

    def _flush(self, now: float) -> str:
        text = self._decoder.flush()
        if self._stops is None:
            return text
        shown = self._stops.feed(text, self._offset + len(self._tokens) >= self._params.min_tokens)
        if self._stops.matched is not None:
            self.end = self._stopped(self._stops.matched, now)
        return shown + self._stops.flush()

    def _cut(self, count: int) -> None:
        """Keep the first `count` waiting tokens."""
        del self._tokens[count:]
        del self._logprobs[count:]

    def _stopped(self, stop: str, now: float) -> End:
        """The end at a stop string. Its times are the engine's if its terminal has arrived, otherwise our own."""
        if self._last is not None:
            times = self._last.times
        else:
            first = now if self._first is None else self._first
            times = Times(self._queue_time, first - self._opened, now - first)
        return End(FinishReason.STOP_STRING, times, stop_string=stop)


def _failed(code: ErrorCode, message: str) -> End:
    return End(FinishReason.ERROR, Times(0.0, 0.0, 0.0), fault=Fault(code.name, message))

"""One sequence of one attempt: takes rows of tokens, gives rows of text."""

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


class Stream:
    """Rows go in by `take` and are only queued, so a backlog is joined; `advance` decodes them; `row` gives the result.

    What has been decoded waits in the stream until it is asked for, joined with what comes after it. After its end
    (`end` is set) a stream is given nothing more.
    """

    __slots__ = (
        "_decoded", "_decoder", "_first", "_interval", "_last", "_logprobs", "_offset", "_opened", "_params",
        "_queue_time", "_stops", "_text", "_tokens",
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
        self._offset = 0
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
        self._tokens += tokens
        if logprobs:
            self._logprobs += logprobs
        self._last = end

    def advance(self, now: float) -> bool:
        """Decode what is queued; whether there is a row to send. Raises whatever the decoder raises: `fail` then."""
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

    def _read(self, tokens: list[int], now: float) -> str:
        """Text of the queued tokens, where they can end the stream."""
        if self._first is None and tokens:
            self._first = now
        last = self._last
        if last is not None and last.reason is FinishReason.STOP_TOKEN and not self._params.include_stop:
            tokens = tokens[:-1]
        text = self._decoder.feed(tokens) if self._stops is None else self._search(self._stops, tokens, now)
        if self.end is None and last is not None:
            self.end = last
            # After an error the text stays what the tokens alone make certain: there a resubmission takes it up.
            if last.reason is not FinishReason.ERROR:
                text += self._flush(now)
        return text

    def _search(self, stops: StopSearch, tokens: list[int], now: float) -> str:
        shown = []
        feed = self._decoder.feed
        short = self._params.min_tokens - self._offset - self._decoded
        for count, token in enumerate(tokens, 1):
            shown.append(stops.feed(feed((token,)), count >= short))
            if stops.found is not None:
                self._cut(self._decoded + count)
                self.end = self._stopped(stops.found, now)
                break
        return "".join(shown)

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

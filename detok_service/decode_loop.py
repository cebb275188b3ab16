"""Turns rows from engines into text for routers: opens streams, queues their tokens and decodes the queued tokens."""

from collections import Counter, deque
from collections.abc import Callable

import structlog

from detok_service.decoders import Decoders
from detok_service.router_links import RouterLinks
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import Engine, Key, TextStream
from detok_service.stream_table import StreamTable
from sluice.wire.errors import ErrorCode
from sluice.wire.params import TextParams
from sluice.wire.rows import End, Open, Started, TokenBatch, TokenLogprob

REPLAY_SECONDS = 0.02
"""Time spent on resumed tokens between two reads of the inbox. Live streams are delayed by at most this much."""
REPLAY_TOKENS = 1024
"""Resumed tokens decoded for one stream before the next stream gets its turn."""
MAX_ROUTER_ROWS = 16_384
"""Limit on rows waiting for one router. Beyond it, unknown rows are reported as a loss in heartbeats, not one by one
as error rows."""


class DecodeLoop:
    """Decodes the streams in the table and passes those with text to their router links.

    At most `max_streams` streams are live at a time.
    """

    def __init__(
        self,
        table: StreamTable,
        links: RouterLinks,
        decoders: Decoders,
        max_streams: int,
        log: structlog.stdlib.BoundLogger,
        clock: Callable[[], float],
    ) -> None:
        self.tokens = 0
        """Tokens received since the start."""
        # The counters below are described in metrics.py.
        self.unknown_rows = 0
        self.stale_opens = 0
        self.failed: Counter[str] = Counter()
        self.dropped = 0
        self._table = table
        self._links = links
        self._decoders = decoders
        self._max_streams = max_streams
        self._log = log
        self._clock = clock
        self._queued: list[TextStream] = []
        """Streams with tokens to decode, without duplicates. Their `queued` flag is set."""
        self._replays: deque[TextStream] = deque()
        """Streams that must decode resumed tokens first. Their `queued` flag is set, but they are not in `_queued`."""
        self._given_up: dict[int, int] = {}
        """By request: the last attempt that was given up since the last flush."""

    @property
    def replaying(self) -> bool:
        """Whether resumed tokens are waiting to be decoded, which needs no new message."""
        return bool(self._replays)

    def ingest(self, batch: TokenBatch, engine: Engine, now: float) -> None:
        """Queue the rows of a batch; `advance` decodes them."""
        for opened in batch.opens:
            self._open(opened, engine, now)
        for logprobs_of_prompt in batch.prompt_logprobs:
            # No router: the attempt was given up, or its Open was lost and its rows will be counted as unknown.
            router = self._table.router(logprobs_of_prompt.request, logprobs_of_prompt.attempt)
            if router is not None:
                self._links.by_address[router].add_prompt_logprobs(logprobs_of_prompt)
        self.tokens += len(batch.tokens)
        # Reads the columns directly: this loop runs for every row of every step.
        find, queued = self._table.live.get, self._queued
        tokens, logprobs, ends = batch.tokens, batch.logprobs, batch.ends
        empty: list[TokenLogprob] = []
        start = 0
        keys = zip(batch.request, batch.attempt, batch.sequence, strict=True)
        for i, (key, offset, count) in enumerate(zip(keys, batch.offset, batch.count, strict=True)):
            stream = find(key)
            stop = start + count
            end = ends.get(i) if ends else None
            if stream is None:
                self._on_unknown_row(key, engine, end, now)
            else:
                stream.ingest(offset, tokens[start:stop], logprobs.get(i, empty) if logprobs else empty, end)
                if not stream.queued:
                    stream.queued = True
                    queued.append(stream)
            start = stop
        # In a separate loop, because few batches contain accepted draft tokens.
        for i, count in batch.accepted.items():
            stream = find((batch.request[i], batch.attempt[i], batch.sequence[i]))
            if stream is not None:
                stream.accepted += count

    def advance(self, now: float) -> None:
        """Decode all queued tokens and pass streams with text to their router links."""
        queued = self._queued.copy()
        self._queued.clear()
        links = self._links.by_address
        for stream in queued:
            stream.queued = False
            try:
                due = stream.advance(now)
            except Exception as error:  # noqa: BLE001 - a decoding error ends this stream only
                self._fail_text(stream, error)
                continue
            if due:
                links[stream.router].add(stream)
                if stream.end is not None:
                    self._table.close(stream)

    def replay(self, now: float) -> None:
        """Decode resumed tokens for at most REPLAY_SECONDS, taking turns among the streams."""
        until = self._clock() + REPLAY_SECONDS
        while self._replays and self._clock() < until:
            stream = self._replays.popleft()
            # The stream was closed while it waited for its turn.
            if self._table.live.get(stream.key) is not stream:
                continue
            try:
                stream.replay(REPLAY_TOKENS, now)
            except Exception as error:  # noqa: BLE001 - a decoding error ends this stream only
                self._fail_text(stream, error)
                continue
            (self._replays if stream.replaying else self._queued).append(stream)
        self.advance(now)

    def drop(self, request: int, attempt: int, now: float) -> None:
        """Close a request's attempts up to and including `attempt`, without sending another row."""
        self.advance(now)
        self.dropped += self._table.give_up(request, attempt)
        # The next flush drops rows that are waiting for a full lane, for all requests in one pass.
        self._given_up[request] = max(attempt, self._given_up.get(request, attempt))

    def end_engine_streams(self, engine: Engine, code: ErrorCode, message: str, now: float) -> None:
        # Decode the queued tokens first: tokens that reach the client need not be computed again.
        self.advance(now)
        for stream in self._table.of_engine(engine):
            self.fail(stream, code, message)

    def end_router_streams(self, address: str, now: float) -> None:
        """End the streams to a router process that was replaced by a new one."""
        self.advance(now)
        for stream in self._table.of_router(address):
            self.fail(stream, ErrorCode.ROWS_LOST, "the router was restarted")

    def fail(self, stream: TextStream, code: ErrorCode, message: str) -> None:
        """End a stream with an error. The stream must not be queued."""
        stream.fail(code, message)
        self.failed[code.name] += 1
        self._links.by_address[stream.router].add(stream)
        self._table.close(stream)

    def flush(self, arrived: float) -> None:
        """Send to the routers. `arrived`: arrival time of the rows decoded since the last flush."""
        if self._given_up:
            self._links.drop(self._given_up)
            self._given_up.clear()
        self._links.flush(arrived)

    def _open(self, opened: Open, engine: Engine, now: float) -> None:
        ended = set(opened.ended)
        keys = [(opened.request, opened.attempt, index) for index in range(opened.n) if index not in ended]
        if not self._accepts(opened, keys, engine, now):
            return
        link = self._links.link_to(opened.router, now)
        if link is None:
            return
        link.start(Started(opened.request, opened.attempt, opened.prompt_tokens, opened.cached_tokens))
        # All sequences of the request share one automaton, which is read-only.
        omitted = self._decoders.omitted_in_stops(opened.text)
        stops = StopStrings(opened.text.stop, omitted) if opened.text.stop else None
        full = len(self._table.live) + len(keys) > self._max_streams
        refusal = f"the detokenizer serves at most {self._max_streams} streams"
        for _, _, sequence in keys:
            search = StopSearch(stops, opened.text.include_stop) if stops else None
            decoder = self._decoders.new(opened.text.skip_special_tokens, opened.text.keep_special_tokens)
            stream = TextStream(opened, sequence, engine, decoder, search, now)
            self._table.add(stream)
            try:
                if opened.prompt_end:
                    decoder.follow(opened.prompt_end)
            except Exception as error:  # noqa: BLE001 - a decoding error ends this stream only
                self._fail_text(stream, error)
                continue
            if stream.replaying:
                stream.queued = True
                self._replays.append(stream)
            # Refuse only after adding the stream, so that the refusal is sent like any other end.
            if full:
                self.fail(stream, ErrorCode.OVERLOADED, refusal)

    def _accepts(self, opened: Open, keys: list[Key], engine: Engine, now: float) -> bool:
        """Whether this attempt is new and was not given up. Closes an earlier live attempt."""
        live = self._table.attempt(opened.request)
        if self._table.is_late(opened.request, opened.attempt):
            for key in keys:
                self._table.remember(key, engine)
        elif live != opened.attempt:
            if live is not None:
                self.drop(opened.request, live, now)
            return True
        self.stale_opens += 1
        return False

    def _on_unknown_row(self, key: Key, engine: Engine, end: End | None, now: float) -> None:
        """Report a row without a live stream, unless the stream ended here or was dropped: its Open was lost.

        A row does not name its router, so the error row goes to every router; routers ignore requests that they do not
        know.
        """
        if self._table.ignores(key, end):
            return
        self.unknown_rows += 1
        if end is None:
            self._table.remember(key, engine)
        request, attempt, sequence = key
        for address, link in self._links.listening():
            if link.waiting >= MAX_ROUTER_ROWS:
                link.count_lost(engine)
                continue
            opened = Open(request, attempt, 1, TextParams(), address, 0, 0)
            stream = TextStream(opened, sequence, engine, self._decoders.new(True), None, now)
            stream.fail(ErrorCode.ROWS_LOST, "the start of the stream was never received")
            link.add(stream)

    def _fail_text(self, stream: TextStream, error: Exception) -> None:
        request, _, sequence = stream.key
        self._log.error("text_failed", request=request, sequence=sequence, exc_info=error)
        self.fail(stream, ErrorCode.TEXT_FAILED, f"decoding raised {type(error).__name__}")

"""From the rows of engines to text for the routers: begins streams, queues their tokens, and decodes what is queued."""

from collections import Counter, deque
from collections.abc import Callable

import structlog

from detok_service.decoder import Decoders
from detok_service.router_links import RouterLinks
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import Engine, Key, TextStream
from detok_service.stream_table import StreamTable
from sluice.ring.errors import ErrorCode
from sluice.ring.params import TextParams
from sluice.ring.rows import End, Open, Started, TokenBatch, TokenLogprob

# Time for resumed tokens between two reads of the inbox: live streams are delayed by this much at most.
REPLAY_SECONDS = 0.02
REPLAY_TOKENS = 1024
"""Of one stream before it is the next one's turn."""
MAX_ROUTER_ROWS = 16_384
"""Rows that wait for a router. Beyond it heartbeats report a loss instead of one error row for each unknown row."""


class DecodeLoop:
    """Takes streams from the table to their router links. At most `max_streams` live at a time."""

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
        """Received since the start."""
        # What these count is described in metrics.py.
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
        """Streams with tokens to decode; each once, and marked `queued`."""
        self._replays: deque[TextStream] = deque()
        """Streams that must read resumed tokens first; marked `queued`, but on this list instead."""
        self._given_up: dict[int, int] = {}
        """The last attempt given up since the last flush, by request."""

    @property
    def replaying(self) -> bool:
        """Whether there is work without new messages."""
        return bool(self._replays)

    def ingest(self, batch: TokenBatch, engine: Engine, now: float) -> None:
        """Queue the rows of a batch; `advance` decodes them."""
        for opened in batch.opens:
            self._open(opened, engine, now)
        for found in batch.prompt_logprobs:
            # Otherwise the attempt was given up, or its rows will be unknown.
            if (router := self._table.router(found.request, found.attempt)) is not None:
                self._links.by_address[router].add_prompt_logprobs(found)
        self.tokens += len(batch.tokens)
        # Reads the columns directly: this loop runs for every row of every step.
        find, queued = self._table.live.get, self._queued
        tokens, logprobs, ends = batch.tokens, batch.logprobs, batch.ends
        none: list[TokenLogprob] = []
        start = 0
        keys = zip(batch.request, batch.attempt, batch.sequence, strict=True)
        for i, (key, offset, count) in enumerate(zip(keys, batch.offset, batch.count, strict=True)):
            stream = find(key)
            stop = start + count
            end = ends.get(i) if ends else None
            if stream is None:
                self._on_unknown_row(key, engine, end, now)
            else:
                stream.ingest(offset, tokens[start:stop], logprobs.get(i, none) if logprobs else none, end)
                if not stream.queued:
                    stream.queued = True
                    queued.append(stream)
            start = stop
        # Apart, because few batches have any.
        for i, count in batch.accepted.items():
            stream = find((batch.request[i], batch.attempt[i], batch.sequence[i]))
            if stream is not None:
                stream.accepted += count

    def advance(self, now: float) -> None:
        queued = self._queued.copy()
        self._queued.clear()
        links = self._links.by_address
        for stream in queued:
            stream.queued = False
            try:
                due = stream.advance(now)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this stream only
                self._fail_text(stream, error)
                continue
            if due:
                links[stream.router].add(stream)
                if stream.end is not None:
                    self._table.close(stream)

    def replay(self, now: float) -> None:
        """Read resumed tokens for REPLAY_SECONDS, each stream a slice in turn."""
        until = self._clock() + REPLAY_SECONDS
        while self._replays and self._clock() < until:
            stream = self._replays.popleft()
            # Closed while it waited for its turn.
            if self._table.live.get(stream.key) is not stream:
                continue
            try:
                stream.replay(REPLAY_TOKENS, now)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail_text(stream, error)
                continue
            (self._replays if stream.replaying else self._queued).append(stream)
        self.advance(now)

    def drop(self, request: int, attempt: int, now: float) -> None:
        """Close a request's attempts up to this one without another row."""
        self.advance(now)
        self.dropped += self._table.give_up(request, attempt)
        # Rows that wait for a full lane are dropped at the next flush, all requests in one pass.
        self._given_up[request] = max(attempt, self._given_up.get(request, attempt))

    def end_engine_streams(self, engine: Engine, code: ErrorCode, message: str, now: float) -> None:
        # First decode what has come: tokens that the client gets need not be computed again.
        self.advance(now)
        for stream in self._table.of_engine(engine):
            self.fail(stream, code, message)

    def end_router_streams(self, address: str, now: float) -> None:
        """End the streams to a router that was replaced. The new process resubmits those that are its own."""
        self.advance(now)
        for stream in self._table.of_router(address):
            self.fail(stream, ErrorCode.ROWS_LOST, "the router has been started again")

    def fail(self, stream: TextStream, code: ErrorCode, message: str) -> None:
        """End a stream that is not queued."""
        stream.fail(code, message)
        self.failed[code.name] += 1
        self._links.add(stream)
        self._table.close(stream)

    def flush(self, arrived: float) -> None:
        """`arrived`: when the rows came that have been decoded since the last flush."""
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
        # One automaton for all sequences of the request: it is read-only.
        stops = StopStrings(opened.text.stop) if opened.text.stop else None
        full = len(self._table.live) + len(keys) > self._max_streams
        refusal = f"the detokenizer serves {self._max_streams} streams at most"
        for _, _, sequence in keys:
            search = StopSearch(stops, opened.text.include_stop) if stops else None
            decoder = self._decoders.new(opened.text.skip_special_tokens)
            stream = TextStream(opened, sequence, engine, decoder, search, now)
            self._table.add(stream)
            if stream.replaying:
                stream.queued = True
                self._replays.append(stream)
            # After it was added, so that the refusal is sent like any other end.
            if full:
                self.fail(stream, ErrorCode.OVERLOADED, refusal)

    def _accepts(self, opened: Open, keys: list[Key], engine: Engine, now: float) -> bool:
        """Whether this attempt is new and still wanted. An earlier live attempt is closed."""
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
        """After our own terminal, or after a Drop, rows are ignored. Any other row means that its Open was lost.

        A row does not name its router, so all of them get an error row; those that do not know the request ignore it.
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
            stream.fail(ErrorCode.ROWS_LOST, "the stream's start never came")
            link.add(stream)

    def _fail_text(self, stream: TextStream, error: Exception) -> None:
        request, _, sequence = stream.key
        self._log.error("text_failed", request=request, sequence=sequence, exc_info=error)
        self.fail(stream, ErrorCode.TEXT_FAILED, f"decoding raised {type(error).__name__}")

"""What engines send, taken to the streams that it is for."""

from detok_service.decode_loop import Decoding
from detok_service.router_links import RouterLinks
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import Engine, Key, Stream
from detok_service.table import Table
from detok_service.tokenizers import Decoders
from sluice.ring.errors import ErrorCode
from sluice.ring.params import TextParams
from sluice.ring.wire import End, Open, Started, TokenBatch, TokenLogprob

MAX_SEQUENCES = 4096
"""More than a request can have."""
MAX_TELLING = 16_384
"""Rows that wait for a router; beyond it the heartbeats report a loss instead of naming each unknown row."""


class Intake:
    """Begins streams and queues their rows; `max_streams` of them at most live at a time."""

    def __init__(
        self, table: Table, outlets: RouterLinks, decoding: Decoding, decoders: Decoders, max_streams: int
    ) -> None:
        self.tokens = 0
        """Received since the start."""
        self.unknown_rows = 0
        """Of streams that never began here."""
        self.stale_opens = 0
        """Of attempts that had been given up, or that a later one had taken the place of."""
        self._table = table
        self._outlets = outlets
        self._decoding = decoding
        self._decoders = decoders
        self._max_streams = max_streams

    def take(self, batch: TokenBatch, engine: Engine, now: float) -> None:
        """Queue what came; it is decoded later."""
        for opened in batch.opens:
            self._start(opened, engine, now)
        self.tokens += len(batch.tokens)
        find, touched = self._table.live.get, self._decoding.touched
        tokens, logprobs, ends = batch.tokens, batch.logprobs, batch.ends
        none: list[TokenLogprob] = []
        start = 0
        keys = zip(batch.request, batch.attempt, batch.sequence, strict=True)
        for i, (key, offset, count) in enumerate(zip(keys, batch.offset, batch.count, strict=True)):
            stream = find(key)
            stop = start + count
            end = ends.get(i) if ends else None
            if stream is None:
                self._take_unknown(key, engine, end, now)
            else:
                stream.take(offset, tokens[start:stop], logprobs.get(i, none) if logprobs else none, end)
                if not stream.touched:
                    stream.touched = True
                    touched.append(stream)
            start = stop

    def _start(self, opened: Open, engine: Engine, now: float) -> None:
        keys = _keys_of(opened)
        if not self._is_news(opened, keys, engine, now):
            return
        outlet = self._outlets.to(opened.router, now)
        if outlet is None:
            return
        outlet.start(Started(opened.request, opened.attempt, opened.prompt_tokens, opened.cached_tokens))
        stops = StopStrings(opened.text.stop) if opened.text.stop else None
        full = len(self._table.live) + len(keys) > self._max_streams
        refusal = f"the detokenizer serves {self._max_streams} streams at most"
        for _, _, sequence in keys:
            search = StopSearch(stops, opened.text.include_stop) if stops else None
            decoder = self._decoders.new(opened.text.skip_special_tokens)
            stream = Stream(opened, sequence, engine, decoder, search, now)
            self._decoding.add(stream)
            if full:
                self._decoding.fail(stream, ErrorCode.OVERLOADED, refusal)

    def _is_news(self, opened: Open, keys: list[Key], engine: Engine, now: float) -> bool:
        """Whether it is wanted, and does not live here already. Attempts before it end in silence."""
        live = self._table.attempt(opened.request)
        if self._table.is_late(opened.request, opened.attempt):
            for key in keys:
                self._table.remember(key, engine)
        elif live != opened.attempt:
            if live is not None:
                self._decoding.drop(opened.request, live, now)
            return True
        self.stale_opens += 1
        return False

    def _take_unknown(self, key: Key, engine: Engine, end: End | None, now: float) -> None:
        """Rows that follow our own terminal are expected; any other row means that its Open was lost.

        Nobody knows whose it is: so every router is told, and those that do not know the request ignore it.
        """
        if self._table.expects(key, end):
            return
        self.unknown_rows += 1
        if end is None:
            self._table.remember(key, engine)
        request, attempt, sequence = key
        for address, outlet in self._outlets.greeted():
            if outlet.waiting >= MAX_TELLING:
                outlet.lose(engine)
                continue
            opened = Open(request, attempt, 1, TextParams(), address, 0, 0)
            stream = Stream(opened, sequence, engine, self._decoders.new(True), None, now)
            stream.fail(ErrorCode.ROWS_LOST, "the stream's start never came")
            outlet.add(stream)


def _keys_of(opened: Open) -> list[Key]:
    """The sequences that are to come."""
    ended = set(opened.ended)
    sequences = range(min(opened.n, MAX_SEQUENCES))
    return [(opened.request, opened.attempt, sequence) for sequence in sequences if sequence not in ended]

"""The detokenizer: token batches of any engines in, text batches to any routers out. One thread, no sockets."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from detok_service.outlet import Outlet, Sender
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import Engine, Key, Stream
from detok_service.tokenizers import Decoders
from sluice.ring.errors import ErrorCode
from sluice.ring.lanes import Gap
from sluice.ring.params import TextParams
from sluice.ring.wire import (
    DetokenizerBeat,
    End,
    Hello,
    Open,
    Pulse,
    Started,
    TokenBatch,
    TokenLogprob,
)

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 30.0
"""After so long without a word a router is gone, with its streams."""
ENGINE_SILENCE_SECONDS = 600.0
"""The same for an engine. One step can take long; it is the router that notices a lost engine in seconds."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a detokenizer tells about itself."""

    name: str
    epoch: int
    address: str
    tokenizer: str = ""
    """Fingerprint of the tokenizer files."""


class Service:
    """Owner of all streams. Call `handle` with what the inbox gave, then `tick`, again and again."""

    def __init__(
        self,
        identity: Identity,
        decoders: Decoders,
        open_lane: Callable[[str], Sender],
        max_streams: int,
        log: structlog.stdlib.BoundLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_lane` raises ValueError for an address that is none."""
        self.draining_since: float | None = None
        """By the service's clock."""
        self.max_streams = max_streams
        self.backlog = 0
        """Messages in the latest call of `handle`."""
        self.tokens = 0
        """Received since the start."""
        self.failed: Counter[str] = Counter()
        """Streams that this end gave up, by error code."""
        self.unknown_rows = 0
        self.gaps = 0
        self._identity = identity
        self._decoders = decoders
        self._open_lane = open_lane
        self._log = log
        self._clock = clock
        self._streams: dict[Key, Stream] = {}
        self._touched: list[Stream] = []
        self._closed: OrderedDict[Key, Engine] = OrderedDict()
        """Sequences whose terminal has been sent while the engine's own is still to come; at most max_streams."""
        self._outlets: dict[str, Outlet] = {}
        self._engines: dict[Engine, float] = {}
        """When each was last heard."""
        self._beaten_tokens = 0
        self._beat_at = self._beaten_at = clock()

    @property
    def streams(self) -> int:
        """Live sequences."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Rows that full lanes hold up."""
        # A copy, for a scrape asks from another thread.
        return sum(outlet.waiting for outlet in list(self._outlets.values()))

    @property
    def beat_at(self) -> float:
        """When `tick` next has a beat to send, by the service's clock."""
        return self._beat_at

    def handle(self, messages: Iterable[Hello | TokenBatch | Pulse | Gap]) -> None:
        """Take all messages, then decode: what came for one sequence is joined. Sends what lanes take."""
        now = self._clock()
        missed = self.backlog = 0
        for message in messages:
            self.backlog += 1
            if isinstance(message, Gap):
                missed = message.missed
                self.gaps += 1
                self._log.warning("gap", lane=message.lane, missed=missed)
                continue
            if isinstance(message, Hello):
                self._greet(message, now)
            else:
                engine = (message.engine, message.engine_epoch)
                if missed:
                    self._advance(now)
                    self._fail_streams_of(engine, ErrorCode.ROWS_LOST, "messages of the engine never came")
                self._engines[engine] = now
                if isinstance(message, TokenBatch):
                    self._take(message, engine, now)
            missed = 0
        self._advance(now)
        self._flush()

    def tick(self) -> None:
        """Beats, and an end to what belongs to the silent. To be called at `beat_at` or a little later."""
        now = self._clock()
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_SECONDS
        self._drop_silent_engines(now)
        self._drop_silent_routers(now)
        self._beat(now)
        self._flush()

    def drain(self) -> None:
        """From now on beats ask routers to place nothing here; what comes is still served."""
        if self.draining_since is None:
            self.draining_since = self._beat_at = self._clock()

    def close(self, linger: float) -> None:
        """End what still lives with DRAINING and close all lanes."""
        for stream in list(self._streams.values()):
            self._fail(stream, ErrorCode.DRAINING, "the detokenizer stops")
        self._flush()
        for outlet in self._outlets.values():
            outlet.close(linger)

    def _greet(self, hello: Hello, now: float) -> None:
        outlet = self._outlet(hello.address, now)
        if outlet is not None:
            outlet.heard = now
            outlet.greeted = True

    def _outlet(self, address: str, now: float) -> Outlet | None:
        """None for an address that is none; what was to go there is lost, and said so."""
        outlet = self._outlets.get(address)
        if outlet is None:
            try:
                lane = self._open_lane(address)
            except ValueError as error:
                self._log.warning("bad address", address=address, error=str(error))
                return None
            outlet = self._outlets[address] = Outlet(lane, self._identity.name, now)
        return outlet

    def _take(self, batch: TokenBatch, engine: Engine, now: float) -> None:
        for opened in batch.opens:
            self._start(opened, engine, now)
        self.tokens += len(batch.tokens)
        find, touched = self._streams.get, self._touched
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
        outlet = self._outlet(opened.router, now)
        if outlet is None:
            return
        outlet.start(Started(opened.request, opened.attempt, opened.prompt_tokens, opened.cached_tokens))
        stops = StopStrings(opened.text.stop) if opened.text.stop else None
        full = len(self._streams) + opened.n > self.max_streams
        for sequence in range(opened.n):
            search = StopSearch(stops, opened.text.include_stop) if stops else None
            decoder = self._decoders.new(opened.text.skip_special_tokens)
            stream = Stream(opened, sequence, engine, decoder, search, now)
            self._streams[stream.key] = stream
            if full:
                self._fail(stream, ErrorCode.OVERLOADED, f"the detokenizer serves {self.max_streams} streams at most")

    def _take_unknown(self, key: Key, engine: Engine, end: End | None, now: float) -> None:
        """Rows that follow our own terminal are expected; any other row means that its Open was lost.

        Nobody knows whose it is: so every router is told, and those that do not know the request ignore it.
        """
        if key in self._closed:
            if end is not None:
                del self._closed[key]
            return
        self.unknown_rows += 1
        if end is None:
            self._remember(key, engine)
        request, attempt, sequence = key
        for address, outlet in self._outlets.items():
            if outlet.greeted:
                opened = Open(request, attempt, 1, TextParams(), address, 0, 0)
                stream = Stream(opened, sequence, engine, self._decoders.new(True), None, now)
                stream.fail(ErrorCode.ROWS_LOST, "the stream's start never came")
                outlet.add(stream)

    def _advance(self, now: float) -> None:
        """Decode what was taken."""
        touched, self._touched = self._touched, []
        outlets = self._outlets
        for stream in touched:
            stream.touched = False
            try:
                due = stream.advance(now)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this stream only
                self._log.exception("text failed", request=stream.key[0], sequence=stream.key[2])
                self._fail(stream, ErrorCode.TEXT_FAILED, f"decoding raised {type(error).__name__}")
                continue
            if due:
                outlets[stream.router].add(stream)
                if stream.end is not None:
                    self._close_stream(stream)

    def _fail(self, stream: Stream, code: ErrorCode, message: str) -> None:
        stream.fail(code, message)
        self.failed[code.name] += 1
        self._outlets[stream.router].add(stream)
        self._close_stream(stream)

    def _fail_streams_of(self, engine: Engine, code: ErrorCode, message: str) -> None:
        for stream in [stream for stream in self._streams.values() if stream.engine == engine]:
            self._fail(stream, code, message)

    def _close_stream(self, stream: Stream) -> None:
        del self._streams[stream.key]
        if not stream.complete:
            self._remember(stream.key, stream.engine)

    def _remember(self, key: Key, engine: Engine) -> None:
        self._closed[key] = engine
        if len(self._closed) > self.max_streams:
            self._closed.popitem(last=False)

    def _flush(self) -> None:
        for outlet in self._outlets.values():
            outlet.flush()

    def _drop_silent_engines(self, now: float) -> None:
        silent = [engine for engine, heard in self._engines.items() if now - heard > ENGINE_SILENCE_SECONDS]
        for engine in silent:
            self._log.warning("engine silent", engine=engine[0], epoch=engine[1])
            self._fail_streams_of(
                engine, ErrorCode.ENGINE_LOST, f"the engine was silent for {ENGINE_SILENCE_SECONDS:g} s"
            )
            del self._engines[engine]
            for key in [key for key, owner in self._closed.items() if owner == engine]:
                del self._closed[key]

    def _drop_silent_routers(self, now: float) -> None:
        silent = [address for address, outlet in self._outlets.items() if now - outlet.heard > SILENCE_SECONDS]
        for address in silent:
            outlet = self._outlets.pop(address)
            dropped = [stream for stream in self._streams.values() if stream.router == address]
            for stream in dropped:
                self._close_stream(stream)
            self._log.warning("router silent", address=address, streams=len(dropped), rows=outlet.waiting)
            outlet.close()

    def _beat(self, now: float) -> None:
        elapsed = now - self._beaten_at
        beat = DetokenizerBeat(
            detokenizer=self._identity.name,
            epoch=self._identity.epoch,
            address=self._identity.address,
            draining=self.draining_since is not None,
            streams=len(self._streams),
            queue_depth=self.backlog + self.waiting,
            tokens_per_second=(self.tokens - self._beaten_tokens) / elapsed if elapsed > 0 else 0.0,
            tokenizer=self._identity.tokenizer,
        )
        self._beaten_tokens = self.tokens
        self._beaten_at = now
        for outlet in self._outlets.values():
            if outlet.greeted:
                outlet.send(beat)

"""The detokenizer's state: receives token batches from engines, sends text batches to routers. Single-threaded; all
sockets belong to the inbox and the lanes that it is given."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from detok_service.decode_loop import DecodeLoop
from detok_service.decoders import Decoders
from detok_service.engines import Engines
from detok_service.router_links import RouterLinks
from detok_service.stream import Engine
from detok_service.stream_table import StreamTable
from sluice.host.limited_log import LimitedLog
from sluice.lanes.inbox import Gap
from sluice.lanes.lane import WatchedLane
from sluice.telemetry.measures import Histogram, Rate
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import DetokenizerHeartbeat, Hello, KeepAlive
from sluice.wire.requests import Drop
from sluice.wire.rows import TokenBatch
from sluice.wire.timing import (
    DRAINING_ROUTER_SILENCE_SECONDS,
    HEARTBEAT_SECONDS,
    ROUTER_SILENCE_SECONDS,
)

PAUSE_SECONDS = 2.0
"""If a heartbeat is later than this, the process was paused."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The constant part of a detokenizer's heartbeats."""

    name: str
    epoch: int
    address: str
    tokenizer: str = ""
    """Fingerprint of the tokenizer files."""
    version: str = ""
    """Version of this build."""


class Detokenizer:
    """Owns all streams. The main loop calls `handle` with the messages of the inbox, then `tick`."""

    def __init__(
        self,
        identity: Identity,
        decoders: Decoders,
        open_lane: Callable[[str], WatchedLane],
        max_streams: int,
        log: structlog.stdlib.BoundLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_lane` raises ValueError for an invalid address."""
        self.draining_since: float | None = None
        """When the drain began, by `clock`."""
        self.max_streams = max_streams
        self.backlog = 0
        """Number of messages in the latest call of `handle`."""
        self.tokens_per_second = 0.0
        """Rate of tokens received in the last second before the latest heartbeat."""
        self.identity = identity
        self._log = log
        self._limited = LimitedLog(log, clock)
        self._clock = clock
        self._table = StreamTable(max_streams)
        self._links = RouterLinks(open_lane, (identity.name, identity.epoch), log, clock)
        self._engines = Engines()
        self.decode_loop = DecodeLoop(self._table, self._links, decoders, max_streams, log, clock)
        self.heartbeat_at = clock()
        """When the next heartbeat is due, by `clock`."""
        self._last_heartbeat_at = self.heartbeat_at
        self._last_heartbeat_tokens = 0
        self._rate = Rate()

    @property
    def streams(self) -> int:
        return len(self._table.live)

    @property
    def waiting(self) -> int:
        return self._links.waiting

    @property
    def delay(self) -> Histogram:
        """See `router_links.Delay`."""
        return self._links.delay.seconds

    def handle(
        self, messages: Iterable[Hello | TokenBatch | KeepAlive | Drop | Gap], arrived: float | None = None
    ) -> None:
        """Ingest all messages, then decode, so that rows of one sequence are joined. Sends what the lanes accept.

        `arrived`: the earliest time, by `clock`, at which the messages may have arrived; default: now.
        """
        now = self._clock()
        missed = self.backlog = 0
        for message in messages:
            self.backlog += 1
            if isinstance(message, Gap):
                # The next message is from the same lane, so its sender is the one whose frames were lost.
                missed = message.missed
                self._log_gap(message)
                continue
            if missed and isinstance(message, Hello | Drop):
                self._engines.on_router_gap(now)
            if isinstance(message, Hello):
                link = self._links.link_to(message.address, now, greeted=True)
                if link is not None and link.on_hello(message, now):
                    self.decode_loop.end_router_streams(message.address, now)
            elif isinstance(message, Drop):
                self.decode_loop.drop(message.request, message.attempt, now)
            else:
                engine = (message.engine, message.engine_epoch)
                self._on_engine_frame(engine, missed, now)
                if isinstance(message, TokenBatch):
                    self.decode_loop.ingest(message, engine, now)
            missed = 0
        self.decode_loop.advance(now)
        self.decode_loop.replay(now)
        self.decode_loop.flush(now if arrived is None else arrived)

    def tick(self) -> None:
        """Send heartbeats, and drop silent engines and routers. Must be called at `heartbeat_at` or a little later."""
        now = self._clock()
        if now < self.heartbeat_at:
            return
        if (late := now - self.heartbeat_at) > PAUSE_SECONDS:
            self._engines.exclude_pause(late, now)
            self._links.exclude_pause(late, now)
        self.heartbeat_at = now + HEARTBEAT_SECONDS
        self._drop_silent_engines(now)
        self._drop_silent_routers(now)
        self._send_heartbeat(now)
        self.decode_loop.flush(now)

    def drain(self) -> None:
        """Announce in heartbeats that routers should place no more streams here. Streams that still arrive are
        served."""
        if self.draining_since is None:
            # Make the next tick send a heartbeat, so that routers stop placing streams here immediately.
            self.draining_since = self.heartbeat_at = self._clock()

    def drained(self, timeout: float) -> bool:
        """Whether all routers know of the drain and no stream is left, or the drain has lasted `timeout` seconds."""
        if self.draining_since is None:
            return False
        now = self._clock()
        unfinished = self._table.live or self.waiting
        return now - self.draining_since >= timeout or (not unfinished and self._links.drain_noticed(now))

    def close(self, linger: float) -> None:
        """End the live streams with DRAINING and close all lanes."""
        for stream in list(self._table.live.values()):
            self.decode_loop.fail(stream, ErrorCode.DRAINING, "the detokenizer is stopping")
        self.decode_loop.flush(self._clock())
        self._links.close(linger)

    def _log_gap(self, gap: Gap) -> None:
        if gap.lane_known:
            self._limited.warning("frames_lost", lane=gap.lane, missed=gap.missed)
        else:
            self._limited.info("lane_taken_over", lane=gap.lane, frames=gap.missed)

    def _on_engine_frame(self, engine: Engine, missed: int, now: float) -> None:
        """Handle the arrival of a frame that follows `missed` lost frames."""
        former = self._engines.on_frame(engine, now)
        if former is not None:
            # Streams of the former process are not ended: the name may be forged, and routers, which detect a restart
            # first, drop them.
            self._limited.warning("engine_restarted", engine=engine[0], former=former[1], epoch=engine[1])
        if missed:
            self._engines.count_missed(engine, missed)
            self.decode_loop.end_engine_streams(engine, ErrorCode.ROWS_LOST, "messages from the engine were lost", now)

    def _drop_silent_engines(self, now: float) -> None:
        for engine in self._engines.silent(now):
            # An idle engine closes its lane, so its silence need not mean that it is dead.
            streams = len(self._table.of_engine(engine))
            log = self._limited.warning if streams else self._limited.info
            log("engine_lost", engine=engine[0], epoch=engine[1], streams=streams)
            self.decode_loop.end_engine_streams(engine, ErrorCode.ENGINE_LOST, "the engine fell silent", now)
            self._engines.forget(engine)
            self._table.forget(engine)

    def _drop_silent_routers(self, now: float) -> None:
        lost, ended = self._links.silent(ROUTER_SILENCE_SECONDS, now), self._links.ended()
        if self.draining_since is not None:
            # A dead router must not prolong the drain until its timeout.
            lost = list(dict.fromkeys([*ended, *self._links.silent(DRAINING_ROUTER_SILENCE_SECONDS, now)]))
        for address in lost:
            dropped = self._table.of_router(address)
            for stream in dropped:
                self._table.close(stream)
            rows = self._links.remove(address, self._engines.epochs)
            # When the whole ring stops, its routers stop first. Nothing to warn about if no stream or row was lost.
            expected = self.draining_since is not None and not dropped and not rows
            log = self._log.info if expected else self._log.warning
            reason = "ended" if address in ended else "silent"
            log("router_lost", address=address, reason=reason, streams=len(dropped), rows=rows)

    def _send_heartbeat(self, now: float) -> None:
        self._rate.add(self._last_heartbeat_at, now, self.decode_loop.tokens - self._last_heartbeat_tokens)
        self.tokens_per_second = self._rate.at(now)
        heartbeat = DetokenizerHeartbeat(
            detokenizer=self.identity.name,
            epoch=self.identity.epoch,
            address=self.identity.address,
            draining=self.draining_since is not None,
            streams=self.streams,
            queue_depth=self.backlog + self.waiting,
            tokens_per_second=self.tokens_per_second,
            tokenizer=self.identity.tokenizer,
            missed=dict(self._engines.missed),
            version=self.identity.version,
        )
        self._last_heartbeat_tokens = self.decode_loop.tokens
        self._last_heartbeat_at = now
        self._links.heartbeat(heartbeat, now)

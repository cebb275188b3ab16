"""The detokenizer: token batches of any engines in, text batches to any routers out. One thread, no sockets."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from detok_service.decode_loop import Decoding
from detok_service.engines import Engines
from detok_service.intake import Intake
from detok_service.router_link import Sender
from detok_service.router_links import RouterLinks
from detok_service.stream import Engine
from detok_service.table import Table
from detok_service.tokenizers import Decoders
from sluice.ring.errors import ErrorCode
from sluice.ring.heartbeats import DetokenizerHeartbeat, Hello, KeepAlive
from sluice.ring.inbox import Gap
from sluice.ring.timing import DRAINING_ROUTER_SILENCE_SECONDS, HEARTBEAT_SECONDS, ROUTER_SILENCE_SECONDS
from sluice.ring.wire import Drop, TokenBatch


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
        self.gaps = 0
        """Times that frames of a lane never came."""
        self.identity = identity
        self._log = log
        self._clock = clock
        self._table = Table(max_streams)
        self._outlets = RouterLinks(open_lane, identity.name, log)
        self._engines = Engines()
        self.decoding = Decoding(self._table, self._outlets, log, clock)
        self.intake = Intake(self._table, self._outlets, self.decoding, decoders, max_streams)
        self._beaten_tokens = 0
        self._heartbeat_at = self._beaten_at = clock()

    @property
    def streams(self) -> int:
        """Live sequences."""
        return len(self._table.live)

    @property
    def remembered(self) -> int:
        """Sequences that ended here while their engine still has to end them."""
        return self._table.remembered

    @property
    def waiting(self) -> int:
        """Rows that full lanes hold up."""
        return self._outlets.waiting

    @property
    def replaying(self) -> bool:
        """Whether `handle` has something to do even if nothing came."""
        return self.decoding.replaying

    @property
    def heartbeat_at(self) -> float:
        """When `tick` next has a heartbeat to send, by the service's clock."""
        return self._heartbeat_at

    def handle(self, messages: Iterable[Hello | TokenBatch | KeepAlive | Drop | Gap]) -> None:
        """Take all messages, then decode: what came for one sequence is joined. Sends what lanes take."""
        now = self._clock()
        missed = self.backlog = 0
        for message in messages:
            self.backlog += 1
            if isinstance(message, Gap):
                missed = message.missed
                self._note(message)
                continue
            if missed and isinstance(message, Hello | Drop):
                self._engines.suspect(now)
            if isinstance(message, Hello):
                if self._outlets.greet(message.address, message.epoch, now):
                    self.decoding.lose_router(message.address, now)
            elif isinstance(message, Drop):
                self.decoding.drop(message.request, message.attempt, now)
            else:
                engine = (message.engine, message.engine_epoch)
                self._hear(engine, missed, now)
                if isinstance(message, TokenBatch):
                    self.intake.take(message, engine, now)
            missed = 0
        self.decoding.advance(now)
        self.decoding.replay(now)
        self.decoding.flush()

    def tick(self) -> None:
        """Heartbeats, and an end to what belongs to the silent. To be called at `heartbeat_at` or a little later."""
        now = self._clock()
        if now < self._heartbeat_at:
            return
        self._heartbeat_at = now + HEARTBEAT_SECONDS
        self._drop_silent_engines(now)
        self._drop_silent_routers(now)
        self._heartbeat(now)
        self.decoding.flush()

    def drain(self) -> None:
        """From now on heartbeats ask routers to place nothing here; what comes is still served."""
        if self.draining_since is None:
            self.draining_since = self._heartbeat_at = self._clock()

    def drained(self, timeout: float) -> bool:
        """Whether a draining service may go: nothing is left of what routers placed here before they heard of it.

        After `timeout` seconds it may go anyway.
        """
        if self.draining_since is None:
            return False
        now = self._clock()
        left = self._table.live or self.waiting
        return now - self.draining_since >= timeout or (not left and self._outlets.warned(now))

    def close(self, linger: float) -> None:
        """End what still lives with DRAINING and close all lanes."""
        for stream in list(self._table.live.values()):
            self.decoding.fail(stream, ErrorCode.DRAINING, "the detokenizer stops")
        self.decoding.flush()
        self._outlets.close(linger)

    def _note(self, gap: Gap) -> None:
        if gap.met:
            self.gaps += 1
            self._log.warning("frames_lost", lane=gap.lane, missed=gap.missed)
        else:
            self._log.info("lane_taken_over", lane=gap.lane, frames=gap.missed)

    def _hear(self, engine: Engine, missed: int, now: float) -> None:
        """A frame came, after `missed` others that did not."""
        former = self._engines.hear(engine, now)
        if former is not None:
            self._log.warning("engine_restarted", engine=engine[0], former=former[1], epoch=engine[1])
            self.decoding.lose(former, ErrorCode.ENGINE_LOST, "the engine has been started again", now)
        if missed:
            self._engines.miss(engine, missed)
            self.decoding.lose(engine, ErrorCode.ROWS_LOST, "messages of the engine never came", now)

    def _drop_silent_engines(self, now: float) -> None:
        for engine in self._engines.silent(now):
            self._log.warning("engine_lost", engine=engine[0], epoch=engine[1])
            self.decoding.lose(engine, ErrorCode.ENGINE_LOST, "the engine has been silent for too long", now)
            self._engines.forget(engine)
            self._table.forget(engine)

    def _drop_silent_routers(self, now: float) -> None:
        bound = ROUTER_SILENCE_SECONDS if self.draining_since is None else DRAINING_ROUTER_SILENCE_SECONDS
        for address in self._outlets.silent(bound, now):
            dropped = self._table.of_router(address)
            for stream in dropped:
                self._table.close(stream)
            rows = self._outlets.remove(address, self._engines.epochs)
            self._log.warning("router_lost", address=address, streams=len(dropped), rows=rows)

    def _heartbeat(self, now: float) -> None:
        elapsed = now - self._beaten_at
        heartbeat = DetokenizerHeartbeat(
            detokenizer=self.identity.name,
            epoch=self.identity.epoch,
            address=self.identity.address,
            draining=self.draining_since is not None,
            streams=self.streams,
            queue_depth=self.backlog + self.waiting,
            tokens_per_second=(self.intake.tokens - self._beaten_tokens) / elapsed if elapsed > 0 else 0.0,
            tokenizer=self.identity.tokenizer,
            missed=self._engines.missed,
        )
        self._beaten_tokens = self.intake.tokens
        self._beaten_at = now
        self._outlets.heartbeat(heartbeat, now)

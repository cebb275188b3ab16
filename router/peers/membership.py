"""Who belongs to the ring now: hellos out, heartbeats in, names resolved again, silence noticed."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog
import zmq

from router.errors import RequestError
from router.peers.discovery import Addresses
from router.peers.peers import B, DetokenizerPeer, EnginePeer, Heard, Peers
from sluice.ring.errors import ErrorCode
from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello
from sluice.ring.keys import PLAIN, Security
from sluice.ring.timing import HELLO_SECONDS

TICK_SECONDS = 0.25
MAX_WARNED = 1000

OnLost = Callable[[EnginePeer | DetokenizerPeer, str, bool, bool], None]
"""The peer, what became of it, whether its lane will be closed (restarted, or off the list), and whether its
process has ended without a drain."""
OnMissed = Callable[[int, DetokenizerPeer], int]
"""Epoch of an engine, and the detokenizer that never got messages of it; how many requests that concerns."""


class Membership:
    """All peers of both kinds.

    `on_lost` learns of those that fall silent, stand still or go, `on_missed` of rows that never came to a detokenizer,
    `on_change` of any news.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        hello: Hello,
        engines: Addresses,
        detokenizers: Addresses,
        timeout: float,
        stall_timeout: float,
        tokenizer: str,
        cache_heard: Callable[[int], int],
        logger: structlog.stdlib.BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        """`tokenizer` is the fingerprint that everybody must have; `cache_heard` is `Hello.cache_heard` by epoch."""

        def to_engine(epoch: int) -> Hello:
            return msgspec.structs.replace(hello, cache_heard=cache_heard(epoch))

        self.engines: Peers[EngineHeartbeat] = Peers(context, to_engine, timeout, stall_timeout, security.to("engine"))
        self.detokenizers: Peers[DetokenizerHeartbeat] = Peers(
            context, lambda _: hello, timeout, stall_timeout, security.to("detok")
        )
        self.ready = asyncio.Event()
        """Set while at least one engine and one detokenizer take work."""
        self._addresses = (engines, detokenizers)
        self._tokenizer = tokenizer
        self._logger = logger
        self._warned: set[str] = set()
        self._on_lost: OnLost = lambda *_: None
        self._on_missed: OnMissed = lambda _, __: 0
        self._on_change: Callable[[], None] = lambda: None

    async def run(
        self, on_lost: OnLost, on_missed: OnMissed, on_change: Callable[[], None], resolve_seconds: float
    ) -> None:
        """Until cancelled."""
        self._on_lost, self._on_missed, self._on_change = on_lost, on_missed, on_change
        self.engines.set_addresses(self._addresses[0].unresolved)
        self.detokenizers.set_addresses(self._addresses[1].unresolved)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._resolve(resolve_seconds))
            tasks.create_task(self._greet())
            tasks.create_task(self._watch())

    def hear(self, heartbeat: EngineHeartbeat | DetokenizerHeartbeat) -> bool:
        """Take a heartbeat; False where nobody known sent it."""
        if heartbeat.tokenizer not in ("", self._tokenizer):
            self._warn(heartbeat.address, "heartbeat from a peer with another model's tokenizer")
            return False
        if isinstance(heartbeat, EngineHeartbeat):
            known = self._hear(self.engines, heartbeat, heartbeat.engine)
        else:
            known = self._hear(self.detokenizers, heartbeat, heartbeat.detokenizer)
        if known and heartbeat.missed:
            self._check_missed(heartbeat.epoch)
        return known

    async def wait(self, deadline: float) -> None:
        """Until the ring is ready. Raises RequestError at the deadline (on time.monotonic's clock)."""
        if self.ready.is_set():
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self.ready.wait()
        except TimeoutError:
            if not self.engines.usable:
                raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive") from None
            raise RequestError(ErrorCode.NO_DETOKENIZER, "no detokenizer is known to be alive") from None

    def close(self) -> None:
        """Close all lanes."""
        self.engines.close()
        self.detokenizers.close()

    def _hear(self, peers: Peers[B], heartbeat: B, name: str) -> bool:
        heard, former = peers.hear(heartbeat, time.monotonic())
        if heard is Heard.UNKNOWN:
            self._warn(heartbeat.address, "heartbeat from an address that is not configured")
        if former is not None:
            self._logger.warning("peer restarted", peer=name, address=heartbeat.address)
            self._on_lost(former, "restarted", True, not (former.dead or former.asked_to_drain))
            former.lane.close()
        if heard is Heard.NEW:
            self._logger.info("peer heard", peer=name, address=heartbeat.address, draining=heartbeat.draining)
        self._changed()
        return heard in (Heard.SAME, Heard.NEW)

    def _check_missed(self, epoch: int) -> None:
        """What a peer never got may have been anybody's."""
        for engine in self.engines.heard:
            if engine.epoch == epoch and engine.lane.epoch in (missed := engine.news_of_missed()):
                self._logger.warning("messages lost", engine=engine.name, missed=missed[engine.lane.epoch])
                self._on_lost(engine, "never got some messages", False, False)
        for detokenizer in self.detokenizers.heard:
            for source, count in detokenizer.news_of_missed().items() if detokenizer.epoch == epoch else ():
                if requests := self._on_missed(source, detokenizer):
                    told = {"engine_epoch": source, "missed": count, "requests": requests}
                    self._logger.warning("messages lost", detokenizer=detokenizer.name, **told)

    def _warn(self, address: str, what: str) -> None:
        if address not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(address)
            self._logger.warning(what, address=address)

    def _changed(self) -> None:
        if self.engines.usable and self.detokenizers.usable:
            self.ready.set()
        else:
            self.ready.clear()
        self._on_change()

    async def _greet(self) -> None:
        while True:
            self.engines.greet()
            self.detokenizers.greet()
            await asyncio.sleep(HELLO_SECONDS)

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            # A pause of this whole process is no silence of the others: their heartbeats wait in the inbox.
            late = now - last - TICK_SECONDS
            last = now
            if late > TICK_SECONDS:
                self._forgive(late)
            self.engines.check_lanes()
            self.detokenizers.check_lanes()
            self._check(self.engines, now)
            self._check(self.detokenizers, now)

    def _forgive(self, seconds: float) -> None:
        self.engines.forgive(seconds)
        self.detokenizers.forgive(seconds)

    def _check(self, peers: Peers[B], now: float) -> None:
        for peer in peers.fall_silent(now):
            self._logger.warning("peer lost", peer=peer.name, address=peer.address)
            self._on_lost(peer, "fell silent", False, peer.dead)
            self._changed()
        for peer in peers.stand_still(now):
            self._logger.warning("peer stands still", peer=peer.name, address=peer.address)
            self._on_lost(peer, "stands still", False, False)
            self._changed()

    async def _resolve(self, interval: float) -> None:
        while True:
            self._follow(self.engines, await self._addresses[0].look_up())
            self._follow(self.detokenizers, await self._addresses[1].look_up())
            await asyncio.sleep(interval)

    def _follow(self, peers: Peers[B], addresses: dict[str, frozenset[str]]) -> None:
        for gone in peers.set_addresses(addresses):
            self._on_lost(gone, "is not listed any more", True, False)
            gone.lane.close()

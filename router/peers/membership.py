"""Tracks which peers are in the ring: sends hellos, receives heartbeats, resolves names, detects lost peers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.discovery import Addresses
from router.peers.peers import B, DetokenizerPeer, EnginePeer, HeartbeatSource, Peers
from sluice.host.limited_log import LimitedLog
from sluice.lanes.keys import PLAIN, Security
from sluice.settings.router import PeerSettings
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello
from sluice.wire.timing import HELLO_SECONDS, WATCH_SECONDS

RESOLVE_SECONDS = 2.0
"""Interval at which the peers' names and files are looked up. New replicas are used after at most this delay."""
PAUSE_SECONDS = 0.25
"""If a check of the peers is this late, the process was paused."""
MAX_WARNED = 1000
"""Addresses for which a warning is logged."""

OnLost = Callable[[EnginePeer | DetokenizerPeer, str, bool, bool], None]
"""(peer, reason, gone, died). `gone`: the peer restarted or was removed, so its lane will be closed. `died`: its
process ended without a drain."""
OnMissed = Callable[[int, DetokenizerPeer], int]
"""(epoch of an engine, detokenizer that missed messages from it) -> number of affected requests."""


class Membership:
    """All engines and detokenizers.

    Calls `on_lost` for a peer that fell silent, stalled, restarted or was removed, `on_missed` for rows that did not
    reach a detokenizer, and `on_change` after every change of state.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        hello: Hello,
        addresses: tuple[Addresses, Addresses],
        settings: PeerSettings,
        tokenizer: str,
        cache_version: Callable[[int], int],
        adapters_version: Callable[[int], int],
        prompt_adapters_version: Callable[[int], int],
        log: BoundLogger,
        security: Security = PLAIN,
    ) -> None:
        """`tokenizer`: fingerprint that all peers must report. `cache_version`, `adapters_version` and
        `prompt_adapters_version`: number of the latest known change of an engine's prefix cache and adapters, by its
        epoch."""

        def to_engine(epoch: int) -> Hello:
            return msgspec.structs.replace(
                hello,
                cache_known=cache_version(epoch),
                adapters_known=adapters_version(epoch),
                prompt_adapters_known=prompt_adapters_version(epoch),
            )

        timeouts = settings.peer_timeout, settings.stall_timeout
        self.engines: Peers[EngineHeartbeat] = Peers(context, to_engine, *timeouts, security.to("engine"))
        self.detokenizers: Peers[DetokenizerHeartbeat] = Peers(
            context, lambda _: hello, *timeouts, security.to("detok")
        )
        self._kinds: tuple[Peers[Any], ...] = (self.engines, self.detokenizers)
        self.ready = asyncio.Event()
        """Set while at least one engine and one detokenizer accept work."""
        self._addresses = addresses
        self._tokenizer = tokenizer
        self._log = log
        self._rejections = LimitedLog(log)
        self._warned: set[str] = set()
        self._on_lost: OnLost = lambda *_: None
        self._on_missed: OnMissed = lambda _, __: 0
        self._on_change: Callable[[], None] = lambda: None

    async def run(self, on_lost: OnLost, on_missed: OnMissed, on_change: Callable[[], None]) -> None:
        self._on_lost, self._on_missed, self._on_change = on_lost, on_missed, on_change
        for peers, addresses in zip(self._kinds, self._addresses, strict=True):
            peers.set_addresses(addresses.unresolved)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._resolve())
            tasks.create_task(self._send_hellos())
            tasks.create_task(self._watch())

    def on_heartbeat(self, heartbeat: EngineHeartbeat | DetokenizerHeartbeat) -> bool:
        """Whether the heartbeat is from a current peer; other heartbeats are ignored."""
        if heartbeat.tokenizer not in ("", self._tokenizer):
            self._warn(heartbeat.address, "the peer has a different tokenizer")
            return False
        if isinstance(heartbeat, EngineHeartbeat):
            known = self._update(self.engines, heartbeat, heartbeat.engine)
        else:
            known = self._update(self.detokenizers, heartbeat, heartbeat.detokenizer)
        if known and heartbeat.missed:
            self._check_missed(heartbeat.epoch)
        return known

    async def wait(self, deadline: float) -> None:
        """Wait until the ring is ready. Raises RequestError at the deadline (by time.monotonic)."""
        if self.ready.is_set():
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self.ready.wait()
        except TimeoutError:
            if not self.engines.usable:
                raise RequestError(ErrorCode.NO_ENGINE, "no engine is available") from None
            raise RequestError(ErrorCode.NO_DETOKENIZER, "no detokenizer is available") from None

    def close(self) -> None:
        for peers in self._kinds:
            peers.close()

    def _update(self, peers: Peers[B], heartbeat: B, name: str) -> bool:
        source, former = peers.on_heartbeat(heartbeat, time.monotonic())
        if source is HeartbeatSource.UNKNOWN:
            self._warn(heartbeat.address, "the address is not configured")
        if source is HeartbeatSource.FORGED:
            self._warn(heartbeat.address, f"it is not from the peer at this address, although it names {name}")
        if former is not None:
            self._log.warning("peer_restarted", peer=name, address=heartbeat.address)
            # Report a death only once, so not again if the peer was already reported dead when it fell silent.
            self._on_lost(former, "restarted", True, not (former.dead or former.asked_to_drain))
            former.lane.close()
        if source is HeartbeatSource.NEW:
            self._log.info("peer_joined", peer=name, address=heartbeat.address, draining=heartbeat.draining)
        self._changed()
        return source in (HeartbeatSource.ALIVE, HeartbeatSource.NEW)

    def _check_missed(self, epoch: int) -> None:
        # Any request may have had messages in the lost frames, so all requests that use the lane are affected.
        for engine in self.engines.alive:
            if engine.epoch == epoch and engine.lane.epoch in (missed := engine.newly_missed()):
                self._log.warning("frames_lost", engine=engine.name, missed=missed[engine.lane.epoch])
                self._on_lost(engine, "missed messages", False, False)
        for detokenizer in self.detokenizers.alive:
            for source, count in detokenizer.newly_missed().items() if detokenizer.epoch == epoch else ():
                if requests := self._on_missed(source, detokenizer):
                    details = {"engine_epoch": source, "missed": count, "requests": requests}
                    self._log.warning("frames_lost", detokenizer=detokenizer.name, **details)

    def _warn(self, address: str, reason: str) -> None:
        # Warn once per address, and for a limited number of addresses. Otherwise anyone who can connect could flood the
        # log.
        if address not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(address)
            self._rejections.warning("heartbeat_rejected", address=address, reason=reason)

    def _changed(self) -> None:
        if self.engines.usable and self.detokenizers.usable:
            self.ready.set()
        else:
            self.ready.clear()
        self._on_change()

    async def _send_hellos(self) -> None:
        while True:
            for peers in self._kinds:
                peers.send_hellos()
            await asyncio.sleep(HELLO_SECONDS)

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            # Do not count a pause of this process as silence of the peers: their heartbeats piled up in the inbox.
            late = now - last - WATCH_SECONDS
            last = now
            for peers in self._kinds:
                if late > PAUSE_SECONDS:
                    peers.exclude_pause(late)
                peers.check_lanes()
            for peers in self._kinds:
                self._check(peers, now)

    def _check(self, peers: Peers[B], now: float) -> None:
        for peer in peers.mark_silent(now):
            self._log.warning("peer_lost", peer=peer.name, address=peer.address)
            self._on_lost(peer, "fell silent", False, peer.dead)
            self._changed()
        for peer in peers.mark_stalled(now):
            self._log.warning("peer_stalled", peer=peer.name, address=peer.address)
            self._on_lost(peer, "stalled", False, False)
            self._changed()

    async def _resolve(self) -> None:
        while True:
            for peers, addresses in zip(self._kinds, self._addresses, strict=True):
                for removed in peers.set_addresses(await addresses.look_up()):
                    self._on_lost(removed, "was removed", True, False)
                    removed.lane.close()
            await asyncio.sleep(RESOLVE_SECONDS)

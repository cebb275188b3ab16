"""What the router does with the ring's messages, and whenever its peers change."""

import asyncio

import structlog

from router.api.health import HealthService
from router.api.stats_broadcast import StatsBroadcast
from router.peers.membership import Membership
from router.peers.placement import Placement
from router.requests.admission import Admission
from router.requests.dispatcher import Dispatcher
from router.requests.registry import Requests
from router.requests.serving_model import ServingModel
from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat
from sluice.ring.inbox import Gap
from sluice.ring.wire import TextBatch, ToRouter


class RingEvents:
    """Passes every message on to the parts that it concerns."""

    def __init__(
        self,
        membership: Membership,
        placement: Placement,
        serving: ServingModel,
        requests: Requests,
        dispatcher: Dispatcher,
        admission: Admission,
        max_live: int,
        stats_broadcast: StatsBroadcast,
        health: HealthService,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """`max_live`: requests admitted at most, whatever the engines can hold."""
        self._membership = membership
        self._placement = placement
        self._serving = serving
        self._requests = requests
        self._dispatcher = dispatcher
        self._admission = admission
        self._max_live = max_live
        self._stats_broadcast = stats_broadcast
        self._health = health
        self._log = log
        self._gap: Gap | None = None
        self._catching_up: asyncio.Handle | None = None

    def on_message(self, message: ToRouter | Gap) -> None:
        if isinstance(message, Gap):
            self._gap = message
            return
        gap, self._gap = self._gap, None
        if isinstance(message, EngineHeartbeat):
            if self._membership.hear(message):
                self._placement.hear_engine(message)
                self._catch_up()
                self._stats_broadcast.on_heartbeat(message)
            return
        if gap is not None:
            # The frame after a gap is of the same lane, so it tells whose messages were lost.
            requests = self._dispatcher.on_messages_lost(message.detokenizer)
            if gap.met or requests:
                self._log.warning("messages_lost", detokenizer=message.detokenizer, requests=requests)
        if isinstance(message, TextBatch):
            self._dispatcher.on_text_batch(message)
        elif isinstance(message, DetokenizerHeartbeat) and self._membership.hear(message):
            self._placement.hear_detokenizer(message)

    def on_change(self) -> None:
        """Membership changed, or a peer's heartbeat came, or a drain has begun."""
        self._serving.watch(self._membership.engines.all)
        self._dispatcher.move_off_draining()
        self._dispatcher.move_off_cut_off()
        self._health.set(self._membership.ready.is_set() and not self._requests.closed)
        heartbeats = [peer.heartbeat for peer in self._membership.engines.usable if peer.heartbeat]
        capacity = sum(heartbeat.stats.max_requests for heartbeat in heartbeats)
        # An engine holds more requests than one of its batches runs.
        places = sum(heartbeat.max_batch_size or heartbeat.stats.max_requests for heartbeat in heartbeats)
        # Without an engine requests are admitted and wait for one, up to `peer_wait`, instead of being refused at once.
        self._admission.resize(min(self._max_live, capacity or self._max_live), places)

    def not_ready_because(self) -> str | None:
        """Why new requests would not get through. Called from the thread of a probe."""
        if self._requests.closed:
            return "it is draining"
        if self._membership.ready.is_set():
            return None
        usable = {
            "engine": any(peer.usable for peer in self._membership.engines.all),
            "detokenizer": any(peer.usable for peer in self._membership.detokenizers.all),
        }
        return f"no {' and no '.join(kind for kind, there in usable.items() if not there)} takes work"

    def _catch_up(self) -> None:
        """Apply cache events piece by piece: all of a large cache at once would hold up every stream."""
        if self._catching_up is None and self._placement.catch_up():
            self._catching_up = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._catching_up = None
        self._catch_up()

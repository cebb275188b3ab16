"""The half of the router behind its gRPC services: owns the requests and the peers, and handles the ring's messages."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import zmq
from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.adapters import Adapters
from router.peers.cache_events import CacheEventReaders
from router.peers.discovery import Addresses
from router.peers.engine_calls import EngineCalls
from router.peers.inbox import RouterInbox
from router.peers.membership import Membership
from router.peers.offers import Offers
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Placement
from router.peers.prompt_adapters import PromptAdapters
from router.readiness import Readiness
from router.requests.admission import Admission
from router.requests.attempt_sender import AttemptSender
from router.requests.dispatcher import Dispatcher
from router.requests.losses import Losses
from router.requests.overview import Overview
from router.requests.recovery import Recovery
from router.requests.registry import RequestCounters, Requests
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from sluice.host.limited_log import LimitedLog
from sluice.lanes.inbox import Gap
from sluice.settings.services import RouterSettings
from sluice.wire.adapters import AdapterLoaded, PromptAdapterRead
from sluice.wire.cache_events import CacheEvents
from sluice.wire.calls import CallAnswer
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello, KeepAlive
from sluice.wire.requests import ToRouter
from sluice.wire.rows import TextBatch
from sluice.wire.tensors import TensorBatch

CACHED_BLOCKS = 1 << 16
"""Block hashes remembered per engine for placement: about 10 MiB, a million tokens."""
MAX_SOCKETS = 8192
"""ZeroMQ's limit. Its default of 1023 is enough for only 341 peers."""
GRACE_SLACK_SECONDS = 0.02
HAND_BACK_SECONDS = 2.0
"""Time for the final responses of requests that are handed back to reach their clients."""


class RingSide:
    """Does not depend on gRPC services. Must be created on a running event loop.

    Raises AddressError, InsecureError, KeysError, ListenError.
    """

    def __init__(
        self,
        settings: RouterSettings,
        context_tokens: int,
        tokenizer: str,
        on_engine_heartbeat: Callable[[EngineHeartbeat], None],
        on_ready: Callable[[bool], None],
        log: BoundLogger,
    ) -> None:
        """`tokenizer`: fingerprint that all peers must report. `on_ready` is called with whether requests can be
        served."""
        self._settings = settings
        self._log = log
        self._gaps = LimitedLog(log)
        self._on_engine_heartbeat = on_engine_heartbeat
        self._on_ready = on_ready
        self._gap: Gap | None = None
        """A gap in the lane of the message that comes next."""
        self._cache_update: asyncio.Handle | None = None
        """Scheduled call that applies the next slice of the engines' reported cache changes."""
        self.draining = False
        """The router reports not ready. New requests are accepted until `drain` is called."""
        self._readiness = Readiness(settings.ready_grace)
        self._grace_ends: asyncio.TimerHandle | None = None
        """Latest timer for the end of a grace period. Earlier ones that still run have no effect."""
        self._connect(tokenizer)
        self.adapters = Adapters(
            self.membership, self.address, settings.lora_upload_memory, settings.lora_adapters, log
        )
        self.prompt_adapters = PromptAdapters(self.membership, self.address, settings.prompt_adapters, log)
        self.requests = Requests(settings.max_open, settings.max_tenant_requests)
        self.admission = Admission(settings, time.monotonic)
        self.counters = RequestCounters()
        # Quarantine may take half of the recovery time. In the other half, suspects run like other requests.
        self.suspects = Suspects(settings.recovery_timeout / 2, time.monotonic)
        self.serving = ServingModel(settings.allow_mixed_models, log, settings.serving_version)
        self.offers = Offers(self.membership.engines, context_tokens)
        self._connect_requests()
        self.overview = Overview(
            self.membership, self.requests, self.admission, self.dispatcher, self.serving, self.counters
        )
        self.calls = EngineCalls(self.membership, self.address, log)
        self.cache_events = CacheEventReaders(self.membership, self.address)

    def start(self) -> Coroutine[Any, Any, None]:
        """Start reading messages. Returns the coroutine that tracks the peers, which runs until it is cancelled."""
        self.inbox.start()
        return self.membership.run(self._on_peer_lost, self.losses.on_frames_lost_between, self.on_change)

    def announce_drain(self) -> None:
        """Report NOT_SERVING while still accepting new requests. Irreversible."""
        self.draining = True
        self.on_change()

    async def drain(self, seconds: float) -> int:
        """Accept no new requests, wait until all have ended, and hand back those still open after `seconds`.

        Irreversible. Returns the number of requests handed back: their clients get DRAINING and resume at another
        router.
        """
        self.requests.close()
        self.announce_drain()
        if await self.requests.wait_idle(seconds):
            return 0
        late = self.requests.open
        for request in late:
            self.dispatcher.hand_back(request, RequestError(ErrorCode.DRAINING, "the router is draining"))
        await self.requests.wait_idle(HAND_BACK_SECONDS)
        return len(late)

    def close(self) -> None:
        if self._grace_ends is not None:
            self._grace_ends.cancel()
        # Close the dispatcher first, so that nothing is sent on a closed lane, and the context last: it waits for all
        # sockets to be closed.
        self.dispatcher.close()
        self.adapters.loads.close()
        self.inbox.close()
        self.membership.close()
        self._context.term()

    def on_change(self) -> None:
        """Called when membership has changed, a peer's heartbeat has arrived, or a drain has begun."""
        self.serving.watch(self.membership.engines.all)
        self.losses.move_off_draining()
        self.losses.move_off_cut_off()
        self._update_readiness()
        heartbeats = [peer.heartbeat for peer in self.membership.engines.usable if peer.heartbeat]
        capacity = sum(heartbeat.stats.max_requests for heartbeat in heartbeats)
        # An engine may hold more requests than run in one of its batches.
        batch_slots = sum(heartbeat.max_batch_size or heartbeat.stats.max_requests for heartbeat in heartbeats)
        # While there is no engine, requests are admitted and wait for up to `peer_wait`, rather than being refused.
        max_live = self._settings.max_live
        self.admission.resize(min(max_live, capacity or max_live), batch_slots)

    def not_ready_because(self) -> str | None:
        """Why new requests would fail; None if the router is ready. Called from a probe's thread."""
        if self.draining:
            return "it is draining"
        if self._readiness.ready:
            return None
        members = self.membership
        usable = {"engine": bool(members.engines.usable), "detokenizer": bool(members.detokenizers.usable)}
        missing = [f"no {kind}" for kind, is_usable in usable.items() if not is_usable]
        # If nothing is missing, the last peer has just joined, and the event loop is about to update the readiness.
        return f"{' and '.join(missing)} accepts work" if missing else None

    def _on_peer_lost(self, peer: EnginePeer | DetokenizerPeer, why: str, gone: bool, died: bool) -> None:
        self.losses.on_peer_lost(peer, why, gone, died)
        # A stalled engine is alive and may still answer.
        if not peer.alive:
            self.calls.on_peer_lost(peer)
            self.adapters.on_peer_lost(peer)
            self.prompt_adapters.on_peer_lost(peer)

    def _update_readiness(self) -> None:
        grace = self._readiness.update(self.membership.ready.is_set())
        if grace is not None:
            # Slightly later than `grace`, because the event loop's clock is coarser than the clock of `Readiness`.
            later = grace + GRACE_SLACK_SECONDS
            self._grace_ends = asyncio.get_running_loop().call_later(later, self._update_readiness)
        self._on_ready(self._readiness.ready and not self.draining)

    def _connect(self, tokenizer: str) -> None:
        settings, security = self._settings, self._settings.security
        # Parse before binding the inbox, since an address may be invalid.
        addresses = self._addresses(settings.engines), self._addresses(settings.detokenizers)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.inbox = RouterInbox(self._context, settings.listen, self._on_message, self._log, security)
        self.address = settings.address(self.inbox.address)
        self.placement = Placement(CACHED_BLOCKS, time.monotonic)
        self.membership = Membership(
            self._context,
            Hello(settings.id, self.address, epoch=secrets.randbits(63)),
            addresses,
            settings,
            tokenizer,
            self.placement.cache_version,
            lambda epoch: self.adapters.known(epoch),
            lambda epoch: self.prompt_adapters.known(epoch),
            self._log,
            security,
        )

    def _addresses(self, entries: tuple[str, ...]) -> Addresses:
        return Addresses(entries, check=self._settings.security.check, log=self._log)

    def _connect_requests(self) -> None:
        settings, log = self._settings, self._log
        requests, membership, suspects = self.requests, self.membership, self.suspects
        attempts = AttemptSender(
            requests, membership, self.placement, self.serving, suspects, self.offers, self.address, log
        )
        recovery = Recovery(attempts, membership, self.admission, settings, suspects, self.counters, log)
        self.losses = Losses(requests, membership, attempts, recovery, suspects, log)
        self.dispatcher = Dispatcher(
            requests, membership, attempts, recovery, self.losses, suspects, settings.peer_wait, self.counters
        )

    def _on_message(self, message: ToRouter | Gap) -> None:
        if isinstance(message, Gap):
            self._gap = message
            return
        gap, self._gap = self._gap, None
        match message:
            case TextBatch() | DetokenizerHeartbeat():
                self._on_text_side(message, gap)
            case CallAnswer():
                self.calls.on_answer(message)
            case AdapterLoaded():
                self.adapters.loads.on_loaded(message)
            case PromptAdapterRead():
                self.prompt_adapters.on_read(message)
            case CacheEvents():
                self.cache_events.on_answer(message)
            case EngineHeartbeat():
                self._on_heartbeat(message)
            case TensorBatch() | KeepAlive():
                self._on_tensors(message, gap)

    def _on_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        if self.membership.on_heartbeat(heartbeat):
            self.placement.on_engine_heartbeat(heartbeat)
            self.adapters.on_heartbeat(heartbeat.epoch, heartbeat.adapters)
            self.prompt_adapters.on_heartbeat(heartbeat.epoch, heartbeat.prompt_adapters)
            self._update_cache()
            self._on_engine_heartbeat(heartbeat)

    def _on_tensors(self, message: TensorBatch | KeepAlive, gap: Gap | None) -> None:
        if gap is not None:
            requests = self.losses.on_tensor_frames_lost(message.engine_epoch)
            if gap.lane_known or requests:
                self._gaps.warning("tensor_frames_lost", engine=message.engine, requests=requests)
        if isinstance(message, TensorBatch):
            self.dispatcher.on_tensor_batch(message)

    def _on_text_side(self, message: TextBatch | DetokenizerHeartbeat, gap: Gap | None) -> None:
        if gap is not None:
            # The message after a gap is from the same lane, so its sender is the one whose frames were lost.
            requests = self.losses.on_frames_lost(message.epoch)
            if gap.lane_known or requests:
                self._gaps.warning("frames_lost", detokenizer=message.detokenizer, requests=requests)
        if isinstance(message, TextBatch):
            self.dispatcher.on_text_batch(message)
        elif self.membership.on_heartbeat(message):
            self.placement.on_detokenizer_heartbeat(message)

    def _update_cache(self) -> None:
        # In slices: applying all changes of a large cache in one go would delay every stream.
        if self._cache_update is None and self.placement.update_cache():
            self._cache_update = asyncio.get_running_loop().call_soon(self._continue_cache_update)

    def _continue_cache_update(self) -> None:
        self._cache_update = None
        self._update_cache()

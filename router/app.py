"""The router's parts, put together: what starts, in which order, and how it stops."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace

import structlog
import zmq
from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.metrics_core import Metric

from router import metrics
from router.access.access import Access
from router.access.principal import Admit
from router.api.admin_service import AdminService
from router.api.cache_flush import CacheFlush
from router.api.generation_service import GenerationService
from router.api.health import SERVICE as HEALTH
from router.api.health import HealthService
from router.api.listener import Listener
from router.api.model_service import ModelService
from router.api.reflection import reflection_handlers
from router.api.rpc import admit_all, handler
from router.api.stats_broadcast import StatsBroadcast
from router.peers.discovery import Addresses
from router.peers.inbox import RouterInbox
from router.peers.membership import Membership
from router.peers.placement import Placement
from router.requests.admission import Admission, Permit
from router.requests.attempts import Attempts
from router.requests.counters import RequestCounters
from router.requests.dispatcher import Dispatcher
from router.requests.drain import Drain
from router.requests.pipeline import RequestPipeline
from router.requests.recovery import Recovery
from router.requests.registry import Requests, RequestState
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from router.text.tokenizer_pool import Text
from router.validate.limits import limits_of
from router.validate.model import describe
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.descriptors import OWN_DESCRIPTORS, WATCHED_LANE_DESCRIPTORS, check_limit
from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello
from sluice.ring.inbox import Gap
from sluice.ring.wire import TextBatch, ToRouter
from sluice.settings.services import RouterSettings
from sluice.telemetry.health import Health
from sluice.telemetry.metrics import registry_of
from sluice.telemetry.progress_beacon import ProgressBeacon
from sluice.telemetry.server import MAX_CONNECTIONS, StatusServer
from sluice.v1 import admin_pb2, generation_pb2

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
MODELS = admin_pb2.DESCRIPTOR.services_by_name["ModelService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
Service = tuple[ServiceDescriptor, object, Admit]
"""What answers its calls, and who says whether they may be made."""

MAX_SOCKETS = 8192
"""Of ZeroMQ, whose default of 1023 is too few for 341 peers."""
CACHED_BLOCKS = 1 << 16
"""Block hashes remembered per engine for placement: about 10 MiB, a million tokens."""
RESOLVE_SECONDS = 5.0
"""Between two look-ups of the peers' names: a new replica takes part about this soon."""
RELOAD_SECONDS = 1.0
"""Between two looks at certificates and tokens, each a stat of a few files."""
PULSE_SECONDS = 0.25
STOP_SECONDS = 0.5
"""Calls that never end of themselves (Watch, StreamStats) are cut after this."""


class RouterApp:
    """One router: a gRPC server before, the ring behind. Make it on a running event loop.

    Raises AccessError, AddressError, CheckpointError, InsecureError, KeysError, ListenError; `start` raises
    RuntimeError where a port cannot be bound.
    """

    def __init__(self, settings: RouterSettings, checkpoint: Checkpoint, logger: structlog.stdlib.BoundLogger) -> None:
        self.settings = settings
        self._logger = logger
        self._access = Access(settings, logger)
        self._model = describe(checkpoint)
        self._limits = limits_of(settings, self._model.max_context_tokens)
        self._text = Text(checkpoint, settings.text_threads, 2 * self._limits.prompt_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        engines, detokenizers = Addresses(settings.engines), Addresses(settings.detokenizers)
        security = settings.security
        for address in (*settings.engines, *settings.detokenizers):
            security.check(address)
        self._inbox = RouterInbox(self._context, settings.listen, self._handle, logger, security)
        self.address = settings.advertise or self._inbox.address
        hello = Hello(settings.id, self.address, epoch=secrets.randbits(63))
        self._placement = Placement(CACHED_BLOCKS, time.monotonic)
        self._members = Membership(
            self._context,
            hello,
            engines,
            detokenizers,
            settings.peer_timeout,
            settings.stall_timeout,
            checkpoint.tokenizer_fingerprint,
            self._placement.cache_heard,
            logger,
            security,
        )
        self._requests = Requests(settings.max_open, settings.max_tenant_requests)
        self._admission = Admission(settings, time.monotonic)
        self._tally = RequestCounters()
        # Half of the time: what is left then is for a suspect to run as any other.
        self._suspects = suspects = Suspects(settings.recovery_timeout / 2)
        self._serving = ServingModel(settings.allow_mixed_models, logger)
        attempts = Attempts(
            self._requests,
            self._members,
            self._placement,
            self._serving,
            suspects,
            self.address,
            self._model.max_context_tokens,
            logger,
        )
        recovery = Recovery(attempts, self._members, self._readmit, settings, suspects, self._tally, logger)
        self._dispatcher = Dispatcher(
            self._requests, self._members, attempts, recovery, suspects, settings.peer_wait, self._tally, logger
        )
        self._steps = StatsBroadcast()
        self._drain = Drain(self._requests, self._dispatcher, self._changed)
        self._health = HealthService(service.full_name for service in (GENERATION, MODELS, ADMIN, HEALTH))
        self._gap: Gap | None = None
        self._catching_up: asyncio.Handle | None = None
        self._pulse = ProgressBeacon(time.monotonic)
        self._status: StatusServer | None = None
        self._listeners = self._make_listeners()
        self.tasks: list[asyncio.Task[None]] = []
        """From `start` on. They end only by a fault."""

    @property
    def port(self) -> int:
        """Of the gRPC server."""
        return self._listeners[0].port

    @property
    def admin_port(self) -> int | None:
        """Of AdminService, where it has its own."""
        return self._listeners[1].port if len(self._listeners) > 1 else None

    @property
    def _admin_address(self) -> str | None:
        """Where AdminService is, if it is anywhere."""
        own = self.settings.admin_port is not None
        return self._listeners[-1].address if own or self.settings.admin_on_main else None

    async def start(self) -> None:
        """Listen, and begin to greet peers."""
        if self.settings.metrics_port:
            self._status = self._serve_status()
        for listener in self._listeners:
            listener.bind()
        self._inbox.start()
        heartbeat = self._members.run(
            self._dispatcher.lose_peer,
            self._dispatcher.lose_rows_between,
            self._changed,
            RESOLVE_SECONDS,
        )
        reloads = self._access.reloads.run(RELOAD_SECONDS)
        for listener in self._listeners:
            await listener.start()
        ended = (listener.ended() for listener in self._listeners)
        self.tasks = [asyncio.create_task(forever) for forever in (heartbeat, reloads, self._turn(), *ended)]
        self._logger.info(
            "ready",
            address=self._listeners[0].address,
            admin_address=self._admin_address,
            inbox=self.address,
            model=self._model.name,
            router=self.settings.id,
        )

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, then close everything."""
        handed_back = await self._drain.run(self.settings.drain_timeout if drain_seconds is None else drain_seconds)
        await asyncio.gather(*(listener.stop(STOP_SECONDS) for listener in self._listeners))
        await self._drain.idle_within(STOP_SECONDS)
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self._dispatcher.close()
        self._inbox.close()
        self._members.close()
        self._context.term()
        self._text.close()
        if self._status is not None:
            self._status.close()
        self._logger.info(
            "stopped",
            handed_back=handed_back,
            malformed_frames=self._inbox.malformed,
            late_rows=self._dispatcher.late_rows,
            unknown_heartbeats=self._members.engines.unknown + self._members.detokenizers.unknown,
        )

    async def _turn(self) -> None:
        while True:
            self._pulse.touch()
            await asyncio.sleep(PULSE_SECONDS)

    def _serve_status(self) -> StatusServer:
        settings = self.settings
        health = Health(self._pulse, settings.live_stall, settings.ready_stall, self._unready)
        return StatusServer(registry_of(self._read_metrics), health, settings.metrics_host, settings.metrics_port)

    def _unready(self) -> str | None:
        """Why new requests would not get through. Called from the thread of a probe."""
        if self._requests.closed:
            return "it is draining"
        if self._members.ready.is_set():
            return None
        usable = {
            "engine": any(peer.usable for peer in self._members.engines.all),
            "detokenizer": any(peer.usable for peer in self._members.detokenizers.all),
        }
        return f"no {' and no '.join(kind for kind, there in usable.items() if not there)} takes work"

    def _read_metrics(self) -> Iterator[Metric]:
        yield from metrics.requests(self._tally, self._requests)
        yield from metrics.admission(self._admission)
        yield from metrics.ring(self._members, self._inbox, self._dispatcher)
        yield from metrics.suspects(self._suspects)
        yield from metrics.steps(self._steps)
        yield from metrics.access(self._access)
        yield from metrics.log()

    def _make_listeners(self) -> list[Listener]:
        """The main one, then that of AdminService where it has its own."""
        front = RequestPipeline(
            self._model,
            self._limits,
            self._text,
            self._requests,
            self._admission,
            self._dispatcher,
            self._tally,
            self._logger,
        )
        generation = GenerationService(
            front, self._text, self._model, self._limits, self.settings.slow_client_timeout, self._logger
        )
        models = ModelService(self._model, self._dispatcher)
        flush = CacheFlush(self._members, self._placement)
        admin = AdminService(self._members, self._serving, self._steps, self._drain, flush, self.settings.drain_timeout)
        caller, operator = self._access.caller, self._access.admin
        main: list[Service] = [(GENERATION, generation, caller), (MODELS, models, caller)]
        administration: list[Service] = [(ADMIN, admin, operator)]
        if self.settings.admin_port is not None:
            return [self._listener("", main, caller), self._listener("admin_", administration, operator)]
        return [self._listener("", main + administration if self.settings.admin_on_main else main, caller)]

    def _listener(self, prefix: str, services: list[Service], reflect: Admit) -> Listener:
        """On the interface and port whose settings begin with `prefix`; with health, which is open to everybody."""
        services = [*services, (HEALTH, self._health, admit_all)]
        names = [service.full_name for service, _, _ in services]
        counted = self._access.counted
        handlers = [handler(service, answers, counted(admit), self._logger) for service, answers, admit in services]
        host, port = getattr(self.settings, f"{prefix}host"), getattr(self.settings, f"{prefix}port")
        handlers += reflection_handlers(names, counted(reflect), self._logger)
        return Listener(host, port, self.settings, self._access.certificates, handlers)

    def _handle(self, message: ToRouter | Gap) -> None:
        if isinstance(message, Gap):
            self._gap = message
            return
        gap, self._gap = self._gap, None
        if isinstance(message, EngineHeartbeat):
            if self._members.hear(message):
                self._placement.hear_engine(message)
                self._catch_up()
                self._steps.hear(message)
            return
        if gap is not None:
            # The frame after a gap is of the same lane, so it tells whose messages were lost.
            requests = self._dispatcher.lose_rows(message.detokenizer)
            if gap.met or requests:
                self._logger.warning("messages lost", detokenizer=message.detokenizer, requests=requests)
        if isinstance(message, TextBatch):
            self._dispatcher.take(message)
        elif isinstance(message, DetokenizerHeartbeat) and self._members.hear(message):
            self._placement.hear_detokenizer(message)

    def _catch_up(self) -> None:
        """Apply cache news piece by piece, with others' turns between."""
        if self._catching_up is None and self._placement.catch_up():
            self._catching_up = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._catching_up = None
        self._catch_up()

    async def _readmit(self, live: RequestState) -> Permit:
        return await self._admission.acquire(live.spec.priority, 0, live.tenant, refusable=False)

    def _changed(self) -> None:
        self._serving.watch(self._members.engines.all)
        self._dispatcher.leave_draining()
        self._dispatcher.leave_cut_off()
        self._health.set(self._members.ready.is_set() and not self._requests.closed)
        heartbeats = [peer.heartbeat for peer in self._members.engines.usable if peer.heartbeat]
        held = sum(heartbeat.stats.max_requests for heartbeat in heartbeats)
        places = sum(heartbeat.max_batch_size or heartbeat.stats.max_requests for heartbeat in heartbeats)
        self._admission.resize(min(self.settings.max_live, held or self.settings.max_live), places)


def fit_connections(settings: RouterSettings, limit: int, logger: structlog.stdlib.BoundLogger) -> RouterSettings:
    """With no more gRPC connections than leave the ring its descriptors, of which there are `limit`.

    ZeroMQ aborts the process if none is left for a connection to an ipc inbox (ipc_listener.cpp).
    """
    peers = len(settings.engines) + len(settings.detokenizers)
    others = OWN_DESCRIPTORS + MAX_CONNECTIONS + peers * WATCHED_LANE_DESCRIPTORS
    check_limit(limit, settings.max_connections + others, logger)
    return replace(settings, max_connections=max(1, min(settings.max_connections, limit - others)))

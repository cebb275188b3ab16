"""The router's parts, put together: what starts, in which order, and how it stops."""

import asyncio
import secrets
import time
from collections.abc import Iterator

import structlog
import zmq
from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.metrics_core import Metric

from router import metrics
from router.access.access import Access
from router.access.principal import Admit
from router.api.admin_service import AdminService
from router.api.generation_service import GenerationService
from router.api.health import SERVICE as HEALTH
from router.api.health import HealthService
from router.api.listener import Listener
from router.api.model_service import ModelService
from router.api.reflection import reflection_handlers
from router.api.rpc import admit_all, handler
from router.api.stats_broadcast import StatsBroadcast
from router.config import RouterSettings
from router.peers.discovery import Addresses
from router.peers.inbox import RouterInbox
from router.peers.membership import Membership
from router.peers.placement import Placement
from router.requests.admission import Admission, Permit
from router.requests.attempts import AttemptSender
from router.requests.counters import RequestCounters
from router.requests.dispatcher import Dispatcher
from router.requests.drain import Drain
from router.requests.pipeline import RequestPipeline
from router.requests.recovery import Patience, Recovery
from router.requests.registry import Requests
from router.requests.request_state import RequestState
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from router.ring_events import RingEvents
from router.text.tokenizer_pool import Text
from router.validate.model import describe
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.heartbeats import Hello
from sluice.telemetry.health import Health
from sluice.telemetry.metrics import registry_of
from sluice.telemetry.progress_beacon import ProgressBeacon
from sluice.telemetry.server import StatusServer
from sluice.v1 import admin_pb2, generation_pb2

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
MODELS = admin_pb2.DESCRIPTOR.services_by_name["ModelService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
Service = tuple[ServiceDescriptor, object, Admit]
"""A service of the .proto files, the object that answers its calls, and the check of who may make them."""

MAX_SOCKETS = 8192
"""Of ZeroMQ, whose default of 1023 suffices for only 341 peers."""
BEACON_SECONDS = 0.25
STOP_SECONDS = 0.5
"""For calls that never end of themselves (Watch, StreamStats) before they are cut."""


class RouterApp:
    """One router: gRPC servers in front, the ring behind. Create it on a running event loop.

    Raises AccessError, AddressError, CheckpointError, InsecureError, KeysError, ListenError; `start` raises
    RuntimeError where a port cannot be bound.
    """

    def __init__(self, settings: RouterSettings, checkpoint: Checkpoint, log: structlog.stdlib.BoundLogger) -> None:
        self.settings = settings
        self._log = log
        self._access = Access(settings, log)
        self._model = describe(checkpoint)
        self._limits = settings.limits(self._model.max_context_tokens)
        self._text = Text(
            checkpoint,
            settings.text_threads,
            settings.max_texts,
            2 * self._limits.prompt_bytes,
            settings.max_text_bytes,
        )
        self._connect_ring(checkpoint.tokenizer_fingerprint)
        self._make_dispatcher()
        self._stats_broadcast = StatsBroadcast()
        self._health = HealthService(service.full_name for service in (GENERATION, MODELS, ADMIN, HEALTH))
        self._events = RingEvents(
            self._membership,
            self._placement,
            self._serving,
            self._requests,
            self._dispatcher,
            self._admission,
            settings.max_live,
            self._stats_broadcast,
            self._health,
            log,
        )
        self._drain = Drain(self._requests, self._dispatcher, self._events.on_change)
        self._beacon = ProgressBeacon(time.monotonic)
        self._status: StatusServer | None = None
        self._listeners = self._make_listeners()
        self.tasks: list[asyncio.Task[None]] = []
        """From `start` on. One that ends is a fault."""

    @property
    def port(self) -> int:
        """Of the main gRPC server."""
        return self._listeners[0].port

    @property
    def admin_port(self) -> int | None:
        """Of AdminService, where it has its own."""
        return self._listeners[1].port if len(self._listeners) > 1 else None

    async def start(self) -> None:
        """Bind every port, then say hello to peers, then take calls."""
        # The status server first: probes get an answer while the rest starts.
        if self.settings.metrics_port:
            self._status = self._serve_status()
        for listener in self._listeners:
            listener.bind()
        # Every port is bound before the first hello: peers answer to an inbox that reads.
        self._inbox.start()
        membership = self._membership.run(
            self._dispatcher.on_peer_lost,
            self._dispatcher.on_messages_lost_between,
            self._events.on_change,
            self.settings.resolve_interval,
        )
        reloads = self._access.reloads.run(self.settings.reload_interval)
        for listener in self._listeners:
            await listener.start()
        has_admin = self.settings.admin_port is not None or self.settings.admin_on_main
        ended = (listener.ended() for listener in self._listeners)
        self.tasks = [asyncio.create_task(forever) for forever in (membership, reloads, self._touch_beacon(), *ended)]
        self._log.info(
            "ready",
            address=self._listeners[0].address,
            admin_address=self._listeners[-1].address if has_admin else None,
            inbox=self.address,
            model=self._model.name,
            router=self.settings.id,
        )

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, then close everything."""
        handed_back = await self._drain.run(self.settings.drain_timeout if drain_seconds is None else drain_seconds)
        await asyncio.gather(*(listener.stop(STOP_SECONDS) for listener in self._listeners))
        await self._drain.wait_idle(STOP_SECONDS)
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        # The dispatcher first: it still has cancels to send through the lanes. The context last: it waits for sockets.
        self._dispatcher.close()
        self._inbox.close()
        self._membership.close()
        self._context.term()
        self._text.close()
        if self._status is not None:
            self._status.close()
        self._log.info(
            "stopped",
            handed_back=handed_back,
            malformed_frames=self._inbox.malformed,
            late_rows=self._dispatcher.late_rows,
            unknown_heartbeats=self._membership.engines.unknown + self._membership.detokenizers.unknown,
        )

    def _connect_ring(self, tokenizer: str) -> None:
        settings, security = self.settings, self.settings.security("router")
        for address in (*settings.engines, *settings.detokenizers):
            security.check(address)
        engines, detokenizers = Addresses(settings.engines), Addresses(settings.detokenizers)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        # Nothing is handed on before `start`, when the events are there.
        self._inbox = RouterInbox(
            self._context, settings.listen, lambda message: self._events.on_message(message), self._log, security
        )
        self.address = settings.advertise or self._inbox.address
        self._placement = Placement(settings.cached_blocks, time.monotonic)
        self._membership = Membership(
            self._context,
            Hello(settings.id, self.address, epoch=secrets.randbits(63)),
            engines,
            detokenizers,
            settings.peer_timeout,
            settings.stall_timeout,
            tokenizer,
            self._placement.cache_heard,
            self._log,
            security,
        )

    def _make_dispatcher(self) -> None:
        settings, log = self.settings, self._log
        self._requests = Requests(settings.max_open, settings.max_tenant_requests)
        self._admission = Admission(
            settings.max_live,
            settings.bounds,
            settings.priority_aging_seconds,
            settings.tenant_weights,
            settings.tenant_kept_part,
            time.monotonic,
        )
        self._counters = RequestCounters()
        # Half of the time: the other half is left for a suspect to run like any other request.
        self._suspects = Suspects(settings.recovery_timeout / 2)
        self._serving = ServingModel(settings.allow_mixed_models, log)
        attempts = AttemptSender(
            self._requests,
            self._membership,
            self._placement,
            self._serving,
            self._suspects,
            self.address,
            self._model.max_context_tokens,
            log,
        )
        patience = Patience(settings.recovery_timeout, settings.recovery_attempts, settings.max_undelivered_tokens)
        recovery = Recovery(attempts, self._membership, self._readmit, patience, self._suspects, self._counters, log)
        self._dispatcher = Dispatcher(
            self._requests,
            self._membership,
            attempts,
            recovery,
            self._suspects,
            settings.peer_wait,
            self._counters,
            log,
        )

    def _make_listeners(self) -> list[Listener]:
        """The main one, then that of AdminService where it has its own port."""
        settings, log = self.settings, self._log
        pipeline = RequestPipeline(
            self._model,
            self._limits,
            self._text,
            self._requests,
            self._admission,
            self._dispatcher,
            self._counters,
            log,
        )
        generation = GenerationService(
            pipeline, self._text, self._model, self._limits, settings.slow_client_timeout, log
        )
        admin = AdminService(
            self._membership, self._placement, self._serving, self._stats_broadcast, self._drain, settings.drain_timeout
        )
        caller, operator = self._access.caller, self._access.admin
        main: list[Service] = [
            (GENERATION, generation, caller),
            (MODELS, ModelService(self._model, self._dispatcher), caller),
        ]
        administration: list[Service] = [(ADMIN, admin, operator)]
        if settings.admin_port is not None:
            return [self._listener("", main, caller), self._listener("admin_", administration, operator)]
        return [self._listener("", main + administration if settings.admin_on_main else main, caller)]

    def _listener(self, prefix: str, services: list[Service], reflect: Admit) -> Listener:
        """On the host and port whose settings begin with `prefix`; health checks are open to everybody."""
        services = [*services, (HEALTH, self._health, admit_all)]
        names = [service.full_name for service, _, _ in services]
        counted = self._access.counted
        handlers = [handler(service, answers, counted(admit), self._log) for service, answers, admit in services]
        host, port = getattr(self.settings, f"{prefix}host"), getattr(self.settings, f"{prefix}port")
        handlers += reflection_handlers(names, counted(reflect), self._log)
        return Listener(host, port, self.settings, self._access.certificates, handlers)

    async def _readmit(self, request: RequestState) -> Permit:
        # No context tokens: its tenant was charged for them with the first permit.
        return await self._admission.acquire(request.spec.priority, 0, request.tenant, refusable=False)

    async def _touch_beacon(self) -> None:
        while True:
            self._beacon.touch()
            await asyncio.sleep(BEACON_SECONDS)

    def _serve_status(self) -> StatusServer:
        settings = self.settings
        health = Health(self._beacon, settings.live_stall, settings.ready_stall, self._events.not_ready_because)
        return StatusServer(registry_of(self._read_metrics), health, settings.metrics_host, settings.metrics_port)

    def _read_metrics(self) -> Iterator[Metric]:
        yield from metrics.requests(self._counters, self._requests)
        yield from metrics.admission(self._admission)
        yield from metrics.ring(self._membership, self._inbox, self._dispatcher)
        yield from metrics.suspects(self._suspects)
        yield from metrics.steps(self._stats_broadcast)
        yield from metrics.access(self._access)
        yield from metrics.log()

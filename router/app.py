"""The router as a whole: assembles the gRPC services and the ring side, and starts and stops them in order."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.metrics_core import Metric
from structlog.stdlib import BoundLogger

from router import metrics
from router.access.access import Access
from router.access.principal import Admit
from router.api.admin_service import AdminService
from router.api.generation_service import GenerationService
from router.api.health import HEALTH, HealthService
from router.api.listener import Listener
from router.api.model_service import ModelService
from router.api.prompt_adapters import PromptAdapterLoader
from router.api.reflection import reflection_handlers
from router.api.rpc import admit_all, handler
from router.api.stats_broadcast import StatsBroadcast
from router.api.watchdog import Watchdog
from router.features import all_features
from router.parse.model import describe, limits_of
from router.requests.pipeline import RequestPipeline
from router.ring_side import RingSide
from router.text.tokenizer_pool import TokenizerPool
from router.trace_queue import TraceQueue
from sluice.checkpoint.folder import Checkpoint
from sluice.settings.read import changed_settings
from sluice.settings.services import RouterSettings
from sluice.telemetry.server import MetricsPort
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, State, StatusFile
from sluice.telemetry.status_report import ServiceReport
from sluice.v1 import admin_pb2, generation_pb2

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
MODELS = admin_pb2.DESCRIPTOR.services_by_name["ModelService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
Service = tuple[ServiceDescriptor, object, Admit]
"""A service of the .proto files, the object that implements it, and the function that authenticates its callers."""

BEACON_SECONDS = 0.25
RELOAD_SECONDS = 1.0
"""Interval between checks for changed certificates and tokens. A check is a stat of a few files."""
STOP_SECONDS = 0.5
"""Time before endless calls such as Watch and StreamSteps are cut."""
NOTICE_SECONDS = 0.5
"""Time from NOT_SERVING until calls are refused, for clients that watch the health to switch to other routers."""
ACCEPTED_SECONDS = 0.1
"""Time for calls that have just arrived to be registered as requests, so that the drain waits for them."""


class RouterApp:
    """One router. Create it on a running event loop.

    Raises AccessError, AddressError, CheckpointError, InsecureError, KeysError, ListenError, and RuntimeError if
    otlp_endpoint is set and its packages are missing. `start` raises RuntimeError if a port cannot be bound.
    """

    def __init__(
        self,
        settings: RouterSettings,
        checkpoint: Checkpoint,
        log: BoundLogger,
        metrics_port: MetricsPort | None = None,
    ) -> None:
        self.settings = settings
        self._log = log
        self._access = Access(settings, log)
        self._model = describe(checkpoint, settings.default_sampling)
        self._limits = limits_of(settings, self._model.max_context_tokens)
        self._text = TokenizerPool(
            checkpoint, settings.text_threads, 2 * self._limits.prompt_bytes, settings.tenant_weights
        )
        self._check_vocabulary()
        if self._model.has_chat and not self._text.shows_tools:
            self._log.warning("chat_template_without_tools", effect="chats with tools will be refused")
        self._stats_broadcast = StatsBroadcast()
        self._health = HealthService(service.full_name for service in (GENERATION, MODELS, ADMIN, HEALTH))
        # Create before the ring: if this raises, no socket is open yet.
        self._traces = open_traces(settings, log)
        self.ring = RingSide(
            settings,
            self._model.max_context_tokens,
            checkpoint.tokenizer_fingerprint,
            self._stats_broadcast.on_heartbeat,
            self._on_change,
            log,
        )
        self._prompt_adapter_loader = PromptAdapterLoader(
            self._model,
            self._limits,
            self.ring.offers,
            self.ring.prompt_adapters,
            settings.prompt_adapter_folders,
        )
        self._status_file = StatusFile()
        self._beacon = ProgressBeacon(time.monotonic, self._status_file)
        self._metrics_port = metrics_port
        self._listeners = self._make_listeners()
        self._leaving: asyncio.Task[None] | None = None
        self._drains = set[asyncio.Task[int]]()
        """Drains in progress."""
        self.tasks: list[asyncio.Task[None]] = []
        """Background tasks that run from `start` to `stop`. If one ends earlier, the router is broken."""

    @property
    def port(self) -> int:
        """Port of the main gRPC server."""
        return self._listeners[0].port

    @property
    def admin_port(self) -> int | None:
        """Port of AdminService, if it has a separate one."""
        return self._listeners[1].port if len(self._listeners) > 1 else None

    async def start(self) -> None:
        """Bind every port, then connect to the peers, then accept calls."""
        self._metrics_port = self._metrics_port or MetricsPort(self.settings)
        self._metrics_port.show(self._beacon, self._read_metrics, self.ring.not_ready_because, self._report)
        for listener in self._listeners:
            listener.bind()
        background = [
            self.ring.start(),
            self.ring.adapters.run(partial(self.ring.adapters.load_path, configured=True)),
            self.ring.prompt_adapters.run(self._prompt_adapter_loader.load_configured),
            self._access.reloads.run(RELOAD_SECONDS),
            self._touch_beacon(),
        ]
        for listener in self._listeners:
            await listener.start()
            background.append(listener.ended())
        self.tasks = [asyncio.create_task(coroutine) for coroutine in background]
        has_admin = self.settings.admin_port is not None or self.settings.admin_on_main
        self._log.info(
            "ready",
            address=self._listeners[0].address,
            admin_address=self._listeners[-1].address if has_admin else None,
            inbox=self.ring.address,
            model=self._model.name,
            router=self.settings.id,
            settings=changed_settings(self.settings),
        )
        self._status_file.report(ServiceStatus("ready", self._listeners[0].address))
        self._report_peers()

    async def drain(self, seconds: float) -> int:
        """Refuse new calls, wait for open requests, and hand back those still open after `seconds`. Returns how many.

        Irreversible. First health reports NOT_SERVING, then the main listener refuses new calls, then `RingSide.drain`
        handles the requests. A separate listener of AdminService stays open.
        """
        drain = asyncio.create_task(self._drain(seconds))
        self._drains.add(drain)
        drain.add_done_callback(self._drains.discard)
        # The drain continues even if the client that requested it disconnects.
        return await asyncio.shield(drain)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, for `drain_timeout` by default, then close everything."""
        ring = self.ring
        handed_back = await self.drain(self.settings.drain_timeout if drain_seconds is None else drain_seconds)
        await asyncio.gather(*(listener.stop(STOP_SECONDS) for listener in self._listeners))
        await ring.requests.wait_idle(STOP_SECONDS)
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        ring.close()
        self._text.close()
        if self._traces is not None:
            # In a thread, because it waits for the collector while the last responses of calls are still being sent.
            await asyncio.to_thread(self._traces.close)
        if self._metrics_port is not None:
            self._metrics_port.close()
        self._log.info(
            "stopped",
            handed_back=handed_back,
            malformed_frames=ring.inbox.malformed,
            late_rows=ring.dispatcher.late_rows,
            unknown_heartbeats=ring.membership.engines.unknown + ring.membership.detokenizers.unknown,
        )

    def _check_vocabulary(self) -> None:
        """Warn if the tokenizer does not fit the model. Not an error: prompts may never use the extra tokens."""
        vocab_size = self._model.vocab_size
        if count := self._text.num_tokens_beyond(vocab_size):
            effect = "prompts with these tokens will be refused"
            self._log.warning("tokenizer_exceeds_model", extra_tokens=count, vocab_size=vocab_size, effect=effect)

    def _make_pipeline(self) -> RequestPipeline:
        ring = self.ring
        return RequestPipeline(
            self._model,
            self._limits,
            self._text,
            ring.requests,
            ring.admission,
            ring.dispatcher,
            ring.offers,
            all_features(
                self._model,
                self._limits,
                self._text,
                ring.adapters,
                ring.prompt_adapters,
                lora_in_requests=self.settings.lora_in_requests,
            ),
            ring.counters,
            self._log,
            None if self._traces is None else self._traces.put,
        )

    def _make_listeners(self) -> list[Listener]:
        """The main listener, then that of AdminService if it has a separate port."""
        settings, ring, text, log = self.settings, self.ring, self._text, self._log
        writes = Watchdog(settings.slow_client_timeout)
        generation = GenerationService(self._make_pipeline(), text, self._model, self._limits, writes, log)
        models = ModelService(
            self._model, ring.offers, ring.adapters, ring.prompt_adapters, self._prompt_adapter_loader
        )
        admin = AdminService(
            settings.id,
            ring.overview,
            models.models,
            ring.membership,
            ring.placement,
            ring.serving,
            ring.calls,
            ring.cache_events,
            self._stats_broadcast,
            ring.requests,
            self.drain,
            settings.drain_timeout,
        )
        caller, operator = self._access.caller, self._access.admin
        main: list[Service] = [(GENERATION, generation, caller), (MODELS, models, caller)]
        administration: list[Service] = [(ADMIN, admin, operator)]
        if settings.admin_port is not None:
            return [self._listener("", main, caller), self._listener("admin_", administration, operator)]
        return [self._listener("", main + administration if settings.admin_on_main else main, caller)]

    def _listener(self, prefix: str, services: list[Service], reflect: Admit) -> Listener:
        """A listener on the host and port whose setting names begin with `prefix`. Health checks need no
        authentication."""
        services = [*services, (HEALTH, self._health, admit_all)]
        names = [service.full_name for service, _, _ in services]
        counted = self._access.counted
        handlers = [handler(service, answers, counted(admit), self._log) for service, answers, admit in services]
        host, port = getattr(self.settings, f"{prefix}host"), getattr(self.settings, f"{prefix}port")
        handlers += reflection_handlers(names, counted(reflect), self._log)
        return Listener(host, port, self.settings, self._access.certificates, handlers)

    async def _drain(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(seconds))
        await self._leaving
        return await self.ring.drain(max(0.0, end - time.monotonic()))

    async def _leave(self, seconds: float) -> None:
        self.ring.announce_drain()
        if self._health.watched:
            await asyncio.sleep(min(NOTICE_SECONDS, seconds))
        self._listeners[0].refuse()
        await asyncio.sleep(min(ACCEPTED_SECONDS, seconds))

    def _on_change(self, ready: bool) -> None:
        self._health.set(ready)
        self._report_peers()

    def _report_peers(self) -> None:
        """Write the live peers to the status file, for the launcher."""
        if self._status_file.in_use:
            membership = self.ring.membership
            peers = {peer.name: peer.epoch for peer in membership.engines.alive}
            peers |= {peer.name: peer.epoch for peer in membership.detokenizers.alive}
            state: State = "draining" if self.ring.draining else "ready"
            self._status_file.update(state, peers)

    async def _touch_beacon(self) -> None:
        while True:
            self._beacon.touch()
            await asyncio.sleep(BEACON_SECONDS)

    def _report(self) -> ServiceReport:
        return self.ring.overview.report(self._listeners[0].address)

    def _read_metrics(self) -> Iterator[Metric]:
        return metrics.read(self.ring, self._stats_broadcast, self._access, self._traces)


def open_traces(settings: RouterSettings, log: BoundLogger) -> TraceQueue | None:
    """The queue for traces, or None if tracing is off. Raises RuntimeError if packages are missing."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from router.otlp import OtlpSender
    except ModuleNotFoundError as error:
        missing = f"otlp_endpoint needs the extra otel: pip install 'sluice-serve[otel]' ({error.name} is missing)"
        raise RuntimeError(missing) from error
    return TraceQueue(OtlpSender(settings.otlp_endpoint, settings.id), log)

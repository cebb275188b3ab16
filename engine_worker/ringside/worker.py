"""One engine process: assembles its parts, runs the step loop, drains."""

import secrets
import time
from collections.abc import Iterator

import zmq
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from structlog.stdlib import BoundLogger

from engine_worker.core.engine import Engine
from engine_worker.hooks import Hooks
from engine_worker.kvcache.keepers import Keepers
from engine_worker.kvcache.pool import CacheCorruptError
from engine_worker.protocol import Runner
from engine_worker.ringside import metrics
from engine_worker.ringside.adapters import Adapters, PromptAdapters
from engine_worker.ringside.calls import Calls
from engine_worker.ringside.heartbeats import EventReads, Heartbeats, RouterTable
from engine_worker.ringside.identity import Identity, limits_of
from engine_worker.ringside.mailbox import Mailbox, Orphans
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.receiver import Receiver
from engine_worker.ringside.stats_log import StatsCallback, StatsLog
from engine_worker.ringside.tensor_outbox import LANE_CAPACITY, TensorOutbox
from engine_worker.step import DeviceLostError
from sluice.checkpoint.folder import Checkpoint
from sluice.host.host_names import HostNames
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.settings.names import find_function
from sluice.settings.services import EngineSettings
from sluice.telemetry.server import MetricsPort
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile
from sluice.telemetry.status_report import ServiceReport
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.requests import ToEngine
from sluice.wire.stats import StatsSource
from sluice.wire.timing import DRAIN_NOTICE_SECONDS

IDLE_SECONDS = 0.25
"""Longest wait for messages while there is nothing to compute."""
FULL_LANE_SECONDS = 0.01
"""Longest wait for messages while something must be polled, such as a full lane with waiting rows."""
LINGER_SECONDS = 1.0
"""How long lanes may take at shutdown to transmit what they have accepted."""
STUCK_SECONDS = 2.0
"""A draining engine drops rows for a lane that has accepted nothing for this long."""


def open_metrics_port(settings: EngineSettings) -> MetricsPort:
    """Raises PortError if the port cannot be opened."""
    return MetricsPort(settings, metrics.start)


class Worker:
    """`serve` runs the step loop in the caller's thread until `stop` has let it drain."""

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        runner: Runner,
        log: BoundLogger,
        metrics_port: MetricsPort | None = None,
        keepers: Keepers | None = None,
    ) -> None:
        """Binds the inbox. `keepers`: see Engine. Raises ListenError, OSError, KeysError, InsecureError; ValueError on
        an unusable stats_callback or scheduler."""
        self._settings = settings
        self._runner = runner
        self._log = log
        self._security = settings.security
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._host_names = HostNames()
        messages: type[ToEngine] = ToEngine  # type: ignore[assignment]
        self._inbox = Inbox(self._context, settings.listen, messages, security=self._security)
        self.address = settings.address(self._inbox.address)
        self.epoch = secrets.randbits(63)
        self.limits = limits_of(settings, checkpoint, runner)
        folder, file = runner.pool_folder, runner.pool_file
        self._keepers = keepers
        self._identity = Identity(
            settings,
            self.limits,
            self.address,
            self.epoch,
            checkpoint.tokenizer_fingerprint,
            kv_group="" if folder is None else folder.group,
            kv_keeper="" if keepers is None else keepers.own,
            kv_layout="" if file is None else file.layout.folder,
        )
        self._connect_core()
        self._connect_routers()
        self._callback = self._make_callback()
        self._status_file = StatusFile()
        self._beacon = ProgressBeacon(time.monotonic, self._status_file)
        self._checked = True
        """Whether the cache was checked since the last step."""
        self._quarantined: int | None = None
        """The request in quarantine, as last announced to the routers."""
        self._stopping = False
        self._draining_since: float | None = None
        self._metrics_port = metrics_port or open_metrics_port(settings)
        self._metrics_port.show(self._beacon, self._read_metrics, self._not_ready_because, self._report)

    def sizes(self) -> dict[str, int]:
        """The engine's limits, for the log."""
        return self._identity.sizes(self._engine.stats.latest) | self._engine.cache.tiers.kept

    def stop(self) -> None:
        """Drain: refuse new requests, let live ones end within drain_timeout, then let `serve` return. Signal-safe."""
        if not self._stopping:
            self._stopping = True
            self._heartbeats.send_now()

    def serve(self) -> None:
        """Raises DeviceLostError, and RuntimeError if the heartbeat thread has died."""
        self._heartbeats.start()
        if self._callback is not None:
            self._callback.start()
        self._status_file.report(ServiceStatus("ready", self.address, self.epoch))
        try:
            while not self._drained():
                stepped = self._engine.step()
                self._calls.finish()
                self._adapters.finish()
                # Before waiting: the heartbeat must be sent before the quarantined request is computed.
                self._announce_quarantine()
                if stepped:
                    self._checked = False
                else:
                    self._wait()
                for outbox in (self._outbox, self._tensors):
                    outbox.flush()
                    outbox.tick()
                self._orphans.end()
                self._beacon.touch(stepped or not self._engine.live.requests or self._engine.intake.preparing)
                # Without heartbeats the routers consider this engine lost: exit, so that it is restarted.
                if not self._heartbeats.is_alive():
                    raise RuntimeError("the thread that sends heartbeats has died")
        except DeviceLostError as error:
            self._log.error("device_lost", error=str(error), requests=len(self._engine.live.requests))
            raise
        finally:
            self._close()

    def _connect_core(self) -> None:
        """Create the core, and the outboxes that send its rows."""
        settings, log = self._settings, self._log
        self._outbox = Outbox(settings.id, self.epoch, self._open_lane, time.monotonic, log)
        self._tensors = TensorOutbox(
            settings.id, self.epoch, self._open_tensor_lane, time.monotonic, log, settings.tensor_buffer
        )
        self._mailbox = Mailbox(self.epoch, lambda: self._receiver.receive(), self._outbox, self._tensors, log)
        self._stats_log = StatsLog()
        box = self._mailbox
        hooks = Hooks(box.get_requests, box.send_responses, box.poll_stop_ids, self._stats_log.append, box.tensor_room)
        self._engine = Engine(self._runner, self.limits, settings, hooks, time.monotonic, log, self._keepers)

    def _connect_routers(self) -> None:
        """Create the handlers of routers' messages other than requests, and the heartbeats that answer them."""
        log, tiers = self._log, self._engine.cache.tiers
        self._routers = RouterTable(time.monotonic)
        self._orphans = Orphans(self._engine, self._mailbox, self._routers, log)
        self._adapters = Adapters(
            self._runner.adapters, self.epoch, lambda router, loaded: self._heartbeats.answer(router, loaded), log
        )
        self._prompt_adapters = PromptAdapters(
            self.epoch, lambda router, read: self._heartbeats.answer(router, read), log
        )
        self._event_reads = EventReads(tiers.events, self._settings.id, self.epoch)
        self._heartbeats = Heartbeats(
            self._context,
            self._routers,
            self._heartbeat,
            self._stats_log,
            tiers.journal.since,
            self._event_reads.take,
            log,
            self._security.to("router"),
            self._adapters.changes_since,
            self._prompt_adapters.changes_since,
        )
        self._calls = Calls(self._runner, self.epoch, self._heartbeats.answer, log)
        self._receiver = Receiver(
            self._inbox,
            self.epoch,
            self._routers,
            self._engine.cache.flush,
            self._calls,
            self._event_reads,
            self._adapters,
            self._prompt_adapters,
            self._mailbox.dropped,
            log,
        )

    def _wait(self) -> None:
        """Wait for messages. If none arrives and there is no request, check the cache."""
        must_poll = self._outbox.waiting or self._tensors.waiting or self._quarantined is not None
        must_poll = must_poll or self._calls.pending or self._engine.intake.preparing or self._adapters.pending
        if self._mailbox.waiting or self._inbox.wait(FULL_LANE_SECONDS if must_poll else IDLE_SECONDS):
            return
        if not self._checked and not self._engine.live.requests:
            self._checked = True
            try:
                self._engine.cache.check()
            except CacheCorruptError as error:
                self._log.error("cache_corrupt", error=str(error))

    def _announce_quarantine(self) -> None:
        holder = self._engine.intake.quarantine.refresh()
        if holder != self._quarantined:
            self._quarantined = holder
            self._heartbeats.send_now()

    def _drained(self) -> bool:
        """Whether `serve` may return."""
        if not self._stopping:
            return False
        now = time.monotonic()
        if self._draining_since is None:
            self._draining_since = now
            self._mailbox.draining = True
            self._status_file.report(ServiceStatus("draining", self.address, self.epoch))
            self._log.info("draining", requests=len(self._engine.live.requests))
        seconds = now - self._draining_since
        if seconds >= self._settings.drain_timeout:
            fault = Fault(ErrorCode.DRAINING.name, "the engine has shut down")
            self._log.info("drain_timed_out", ended=self._engine.end_all(fault))
            return True
        unfinished = self._engine.live.requests or self._calls.pending
        unfinished = unfinished or self._outbox.flowing(STUCK_SECONDS) or self._tensors.flowing(STUCK_SECONDS)
        # Routers send requests here until they know of the drain, and each of these requests must be answered.
        return not unfinished and (seconds >= DRAIN_NOTICE_SECONDS or self._heartbeats.routers_ended)

    def _close(self) -> None:
        self._heartbeats.stop()
        if self._callback is not None:
            self._callback.stop()
        self._metrics_port.close()
        if self._engine.cache.fetches is not None:
            self._engine.cache.fetches.close()
        self._outbox.close(LINGER_SECONDS)
        self._tensors.close(LINGER_SECONDS)
        self._log.info(
            "stopped",
            iterations=self._engine.stats.latest.iteration,
            gaps=self._inbox.gaps,
            malformed=self._inbox.malformed,
            dropped=dict(self._mailbox.dropped),
            unknown_cancels=self._engine.intake.unknown_stops,
            rows_lost=self._outbox.lost,
            tensor_bytes_lost=self._tensors.lost,
        )
        self._inbox.close()
        self._context.term()

    def _make_callback(self) -> StatsCallback | None:
        settings = self._settings
        if not settings.stats_callback:
            return None
        function = find_function("stats_callback", settings.stats_callback)
        source = StatsSource(settings.id, self.limits.fingerprint, settings.model_version, settings.max_batch_size)
        return StatsCallback(function, source, lambda: self._stopping, self._stats_log, self._log)

    def _read_metrics(self) -> Iterator[Metric]:
        return metrics.read(
            self._engine, self._runner.image_usage, self._inbox, self._mailbox, self._outbox, self._callback
        )

    def _report(self) -> ServiceReport:
        return self._identity.report(self._engine.stats.latest, self._stopping)

    def _not_ready_because(self) -> str | None:
        return "it is draining" if self._stopping else None

    def _open_lane(self, address: str) -> Lane:
        return Lane(self._context, address, security=self._security.to("detok"), names=self._host_names)

    def _open_tensor_lane(self, address: str) -> Lane:
        security = self._security.to("router")
        return Lane(self._context, address, LANE_CAPACITY, security, names=self._host_names)

    def _heartbeat(self) -> EngineHeartbeat:
        """Called in the heartbeat thread, so it reads only values that are replaced as a whole."""
        return replace(
            self._identity.heartbeat(self._engine.stats.latest, self._stopping),
            flushes=self._receiver.flushes,
            missed=self._receiver.missed,
            progress=self._beacon.iterations,
            cut_off=self._outbox.cut_off,
            quarantine=self._engine.intake.quarantine.holder,
            cache_events=self._event_reads.enabled,
        )

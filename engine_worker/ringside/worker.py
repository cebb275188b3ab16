"""One engine process: its inbox and lanes, its loop, its heartbeats, its drain."""

import secrets
import time
from collections.abc import Callable, Iterator

import zmq
from prometheus_client.metrics_core import Metric
from structlog.stdlib import BoundLogger

from engine_worker.core.engine import Engine
from engine_worker.core.intake import Terms, fingerprint, longest_sequence
from engine_worker.hooks import Hooks
from engine_worker.kvcache.pool import CacheCorruptError
from engine_worker.ringside import metrics
from engine_worker.ringside.adapters import Adapters
from engine_worker.ringside.calls import Calls
from engine_worker.ringside.event_reads import EventReads
from engine_worker.ringside.heartbeats import Heartbeats, RouterTable
from engine_worker.ringside.mailbox import Mailbox
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.prompt_adapters import PromptAdapters
from engine_worker.ringside.receiver import Receiver
from engine_worker.ringside.stats_log import StatsCallback, StatsLog, find_function
from engine_worker.ringside.tensor_outbox import LANE_CAPACITY, TensorOutbox
from engine_worker.step import LOGITS, DeviceLostError, Runner
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.heartbeats import EngineHeartbeat
from sluice.ring.host_names import HostNames
from sluice.ring.inbox import Inbox
from sluice.ring.lane import Lane
from sluice.ring.stats import StatsSource
from sluice.ring.timing import DRAIN_NOTICE_SECONDS
from sluice.ring.wire import Submit, ToEngine
from sluice.settings.services import EngineSettings
from sluice.telemetry.pages import PortOwner
from sluice.telemetry.server import MetricsPort
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile
from sluice.telemetry.status_report import EngineReport, ServiceReport
from sluice.telemetry.version import build_version

IDLE_SECONDS = 0.25
"""Longest wait for messages while there is nothing to compute."""
FULL_LANE_SECONDS = 0.01
"""The same while rows wait for a full lane or a quarantined request is about to be computed."""
LINGER_SECONDS = 1.0
STUCK_SECONDS = 2.0
"""A draining engine drops rows for a lane that has accepted nothing for this long."""
ORPHAN_CHECK_SECONDS = 1.0


def open_metrics_port(settings: EngineSettings) -> MetricsPort:
    """Raises PortError if it cannot listen."""
    return MetricsPort(settings, metrics.start, PortOwner.of(settings))


class Worker:
    """`serve` runs the step loop in the caller's thread until `stop` has let it drain."""

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        runner: Runner,
        log: BoundLogger,
        metrics_port: MetricsPort | None = None,
    ) -> None:
        """Binds the inbox. Raises ListenError, OSError, KeysError, InsecureError; ValueError on an unusable
        stats_callback or scheduler."""
        self._settings = settings
        self._runner = runner
        self._version = build_version()
        self._log = log
        self._security = settings.security
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        messages: type[ToEngine] = ToEngine  # type: ignore[assignment]
        self._inbox = Inbox(self._context, settings.listen, messages, security=self._security)
        self.address = settings.address(self._inbox.address)
        self.epoch = secrets.randbits(63)
        self.terms = _terms(settings, checkpoint, runner)
        self._host_names = HostNames()
        self._outbox = Outbox(settings.id, self.epoch, self._open_lane, time.monotonic, log)
        self._tensors = TensorOutbox(
            settings.id, self.epoch, self._open_tensor_lane, time.monotonic, log, settings.tensor_buffer
        )
        self._mailbox = Mailbox(self.epoch, lambda: self._receiver.receive(), self._outbox, self._tensors, log)
        self._stats_log = StatsLog()
        box = self._mailbox
        hooks = Hooks(box.get_requests, box.send_responses, box.poll_stop_ids, self._stats_log.append, box.tensor_room)
        self._engine = Engine(runner, self.terms, settings, hooks, time.monotonic, log)
        self._routers = RouterTable(time.monotonic)
        cache_changes, to_router = self._engine.cache.tiers.journal.since, self._security.to("router")
        self._adapters = Adapters(
            runner.adapters, self.epoch, lambda router, loaded: self._heartbeats.answer(router, loaded), log
        )
        self._prompt_adapters = PromptAdapters(
            self.epoch, lambda router, read: self._heartbeats.answer(router, read), log
        )
        self._event_reads = EventReads(self._engine.cache.tiers.events, settings.id, self.epoch)
        self._heartbeats = Heartbeats(
            self._context,
            self._routers,
            self._heartbeat,
            self._stats_log,
            cache_changes,
            self._event_reads.take,
            log,
            to_router,
            self._adapters.news,
            self._prompt_adapters.news,
        )
        self._calls = Calls(runner, self.epoch, self._heartbeats.answer, log)
        self._receiver = Receiver(
            self._inbox,
            self.epoch,
            self._routers,
            self._engine.cache.tiers.flush,
            self._calls,
            self._event_reads,
            self._adapters,
            self._prompt_adapters,
            self._mailbox.dropped,
            log,
        )
        self._callback = self._make_callback()
        self._status_file = StatusFile()
        self._beacon = ProgressBeacon(time.monotonic, self._status_file)
        self._metrics_port = metrics_port or open_metrics_port(settings)
        self._tokenizer = checkpoint.tokenizer_fingerprint
        self._check_orphans_at = time.monotonic() + ORPHAN_CHECK_SECONDS
        self._checked = True
        """Whether the cache was checked since the last step."""
        self._quarantined: int | None = None
        """Holder of the quarantine, as last announced."""
        self._stopping = False
        self._draining_since: float | None = None
        unready = "it is draining"
        self._metrics_port.show(
            self._beacon, self._read_metrics, lambda: unready if self._stopping else None, self._report
        )

    def sizes(self) -> dict[str, int]:
        stats = self._engine.stats.latest
        return {
            "kv_blocks": stats.max_kv_blocks,
            "kv_tokens": stats.max_kv_blocks * stats.tokens_per_kv_block,
            "max_sequence_tokens": self.terms.max_sequence_tokens,
            "max_batch_size": self._settings.max_batch_size,
            "max_tokens_per_step": self._settings.max_tokens_per_step,
            "max_requests": self.terms.max_requests,
        }

    def stop(self) -> None:
        """Drain: refuse new requests, let live ones end within drain_timeout, then let `serve` return. Signal-safe."""
        if not self._stopping:
            self._stopping = True
            self._heartbeats.send_now()

    def serve(self) -> None:
        """Raises DeviceLostError, and RuntimeError if the heartbeats' thread died."""
        self._heartbeats.start()
        if self._callback is not None:
            self._callback.start()
        self._status_file.report(ServiceStatus("ready", self.address, self.epoch))
        try:
            while not self._drained():
                stepped = self._engine.step()
                self._calls.finish()
                self._adapters.finish()
                # Before any wait: the heartbeat must get out before the quarantined request is computed.
                self._announce_quarantine()
                if stepped:
                    self._checked = False
                else:
                    self._wait()
                for outbox in (self._outbox, self._tensors):
                    outbox.flush()
                    outbox.tick()
                self._end_orphans()
                self._beacon.touch(stepped or not self._engine.live.requests or self._engine.intake.preparing)
                # Without heartbeats the routers consider this engine lost: exit and be restarted instead.
                if not self._heartbeats.is_alive():
                    raise RuntimeError("the thread that sends heartbeats has died")
        except DeviceLostError as error:
            self._log.error("device_lost", error=str(error), requests=len(self._engine.live.requests))
            raise
        finally:
            self._close()

    def _wait(self) -> None:
        """Wait for messages. If there is nothing else to do, check the cache."""
        soon = self._outbox.waiting or self._tensors.waiting or self._quarantined is not None or self._calls.pending
        soon = soon or self._engine.intake.preparing or self._adapters.pending
        if self._mailbox.waiting or self._inbox.wait(FULL_LANE_SECONDS if soon else IDLE_SECONDS):
            return
        if not self._checked and not self._engine.live.requests:
            self._checked = True
            try:
                self._engine.cache.check()
            except CacheCorruptError as error:
                self._log.error("cache_corrupt", error=str(error))

    def _end_orphans(self) -> None:
        """End requests whose router was replaced or has fallen silent."""
        if orphans := self._mailbox.take_orphans():
            self._end_where("restarted", lambda spec: (spec.request, spec.attempt) in orphans)
        now = time.monotonic()
        if now < self._check_orphans_at:
            return
        self._check_orphans_at = now + ORPHAN_CHECK_SECONDS
        routers = self._routers.live()
        self._end_where("silent", lambda spec: spec.router not in routers)

    def _end_where(self, why: str, orphaned: Callable[[Submit], bool]) -> None:
        # An error, not an abort: a router that is alive after all recovers the request elsewhere.
        fault = Fault(ErrorCode.ROWS_LOST.name, f"the engine considered the router {why}")
        if ended := self._engine.end_where(orphaned, fault):
            self._log.warning(f"router_{why}", requests=ended)

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
        left = self._engine.live.requests or self._calls.pending or self._outbox.flowing(STUCK_SECONDS)
        left = left or self._tensors.flowing(STUCK_SECONDS)
        # Routers send requests here until they know of the drain, and each of these must be answered.
        return not left and seconds >= DRAIN_NOTICE_SECONDS

    def _close(self) -> None:
        self._heartbeats.stop()
        if self._callback is not None:
            self._callback.stop()
        self._metrics_port.close()
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
        function = find_function(settings.stats_callback)
        source = StatsSource(settings.id, self.terms.fingerprint, settings.model_version)
        return StatsCallback(function, source, lambda: self._stopping, self._stats_log, self._log)

    def _read_metrics(self) -> Iterator[Metric]:
        return metrics.read(
            self._engine, self._runner.image_usage, self._inbox, self._mailbox, self._outbox, self._callback
        )

    def _report(self) -> ServiceReport:
        """For /status.json."""
        own = EngineReport(
            id=self._settings.id,
            state="draining" if self._stopping else "serving",
            address=self.address,
            version=self._version,
            model=self.terms.fingerprint,
            model_version=self._settings.model_version,
        )
        return ServiceReport(self.address, engines=[own.with_stats(self._engine.stats.latest)])

    def _open_lane(self, address: str) -> Lane:
        return Lane(self._context, address, security=self._security.to("detok"), names=self._host_names)

    def _open_tensor_lane(self, address: str) -> Lane:
        security = self._security.to("router")
        return Lane(self._context, address, LANE_CAPACITY, security, names=self._host_names)

    def _heartbeat(self) -> EngineHeartbeat:
        """Called from the heartbeats' thread: reads only what is replaced whole."""
        return EngineHeartbeat(
            engine=self._settings.id,
            epoch=self.epoch,
            address=self.address,
            fingerprint=self.terms.fingerprint,
            max_sequence_tokens=self.terms.max_sequence_tokens,
            draining=self._stopping,
            stats=self._engine.stats.latest,
            flushes=self._receiver.flushes,
            missed=self._receiver.missed,
            tokenizer=self._tokenizer,
            max_batch_size=self._settings.max_batch_size,
            progress=self._beacon.turns,
            cut_off=self._outbox.cut_off,
            quarantine=self._engine.intake.quarantine.holder,
            model_version=self._settings.model_version,
            logits_processors=self._settings.processor_names,
            tensors=sorted(self.terms.tensors),
            has_adapters=self.terms.has_adapters,
            cache_events=self._event_reads.kept,
            hidden_size=self.terms.hidden_size,
            image_rows=self.terms.image_rows,
            version=self._version,
        )


def _terms(settings: EngineSettings, checkpoint: Checkpoint, runner: Runner) -> Terms:
    return Terms(
        fingerprint=fingerprint(checkpoint, settings.weights, runner.dtype, settings.max_attention_window),
        vocab_size=checkpoint.vocab_size,
        max_sequence_tokens=longest_sequence(runner, settings, checkpoint.max_context_tokens),
        max_requests=settings.max_requests,
        processors=frozenset(settings.processor_names),
        tensors=frozenset(runner.tensors) - {LOGITS},
        max_draft_tokens=settings.draft_tokens,
        has_adapters=runner.adapters is not None,
        hidden_size=runner.hidden_size,
        image_rows=runner.image_rows,
    )

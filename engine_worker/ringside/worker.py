"""The engine on the ring: its inbox and lanes, its heartbeats, its end."""

import secrets
import time
from collections.abc import Callable, Iterator

import zmq
from prometheus_client.metrics_core import Metric
from structlog.stdlib import BoundLogger

from engine_worker.core.assembly import assemble, longest_sequence
from engine_worker.core.intake import Terms
from engine_worker.hooks import Hooks
from engine_worker.kvcache.pool import CacheCorruptError
from engine_worker.ringside import metrics
from engine_worker.ringside.fingerprint import fingerprint
from engine_worker.ringside.heartbeats import HEARTBEAT_SECONDS, Heartbeats, Listeners
from engine_worker.ringside.mailbox import Mailbox
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.stats_callback import StatsCallback, find_function
from engine_worker.ringside.stats_log import StatsLog
from engine_worker.step import DeviceLostError, Runner
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.heartbeats import EngineHeartbeat, Hello
from sluice.ring.inbox import Gap, Inbox
from sluice.ring.lane import Lane
from sluice.ring.wire import Cancel, Flush, Submit, ToEngine
from sluice.settings.services import EngineSettings
from sluice.telemetry.health import Health
from sluice.telemetry.metrics import registry_of
from sluice.telemetry.progress_beacon import ProgressBeacon
from sluice.telemetry.server import StatusServer

REST_SECONDS = 0.25
"""Between two looks at the clock while nothing comes in."""
FULL_LANE_SECONDS = 0.01
"""Between two looks at full lanes while there is nothing to compute."""
LINGER_SECONDS = 1.0
LEAVE_SECONDS = 2 * HEARTBEAT_SECONDS
"""Until the routers surely know that this engine takes nothing new: they are told at once, and twice more."""
STUCK_SECONDS = 2.0
"""What waits for a lane that takes nothing for so long does not keep a draining engine: it is dropped."""
ORPHAN_CHECK_SECONDS = 1.0
MAX_FLUSHES_TOLD = 16
MAX_LANES_TOLD = 64


class Worker:
    """One engine process. `serve` runs the step loop in the caller's thread until `stop` has let it drain."""

    def __init__(self, settings: EngineSettings, checkpoint: Checkpoint, runner: Runner, log: BoundLogger) -> None:
        """Binds the inbox. Raises ListenError or OSError where listening fails, ValueError on a bad stats_callback,
        KeysError and InsecureError."""
        self._settings = settings
        self._log = log
        self._security = settings.security
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[ToEngine] = Inbox(
            self._context,
            settings.listen,
            ToEngine,  # type: ignore[arg-type]
            security=self._security,
        )
        self.address = settings.advertise or self._inbox.address
        self.epoch = secrets.randbits(63)
        self.terms = Terms(
            fingerprint=fingerprint(checkpoint, settings.weights, runner.dtype, settings.max_attention_window),
            vocab_size=checkpoint.vocab_size,
            max_sequence_tokens=longest_sequence(runner, settings, checkpoint.max_context_tokens),
            max_requests=settings.max_requests,
        )
        self._outbox = Outbox(settings.id, self.epoch, self._open_lane, time.monotonic, log)
        self._mailbox = Mailbox(self.epoch, self._receive, self._outbox, log)
        self._reports = StatsLog()
        hooks = Hooks(
            self._mailbox.get_requests, self._mailbox.send_responses, self._mailbox.poll_stop_ids, self._reports.put
        )
        self._engine = assemble(runner, self.terms, settings, hooks, time.monotonic, log)
        self._listeners = Listeners(time.monotonic)
        self._heartbeats = Heartbeats(
            self._context,
            self._listeners,
            self._heartbeat,
            self._reports,
            self._engine.cache_news,
            log,
            self._security.to("router"),
        )
        self._callback = self._make_callback()
        self._pulse = ProgressBeacon(time.monotonic)
        self._status = self._serve_status()
        self._flushes: list[tuple[int, int]] = []
        """The latest; replaced whole, for the thread of the heartbeats reads it."""
        self._missed: dict[int, int] = {}
        """Frames lost, by lane; replaced whole too."""
        self._tokenizer = checkpoint.tokenizer_fingerprint
        self._orphans_at = time.monotonic() + ORPHAN_CHECK_SECONDS
        self._checked = True
        self._quarantined: int | None = None
        """Who is, as the routers know."""
        self._stopping = False
        self._draining_since: float | None = None

    def sizes(self) -> dict[str, int]:
        """How much it holds, for the log."""
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
        """Take nothing new, let live requests end or move away within the drain timeout, then let `serve` return.

        Signal-safe.
        """
        if not self._stopping:
            self._stopping = True
            self._heartbeats.hurry()

    def serve(self) -> None:
        """The loop. Raises RuntimeError if the heartbeats die, for then no router knows this engine any more, and
        DeviceLostError."""
        self._heartbeats.start()
        if self._callback is not None:
            self._callback.start()
        try:
            while not self._drained():
                stepped = self._engine.step()
                # Before any rest: it has to get out before that request is computed.
                self._tell_of_quarantine()
                if stepped:
                    self._checked = False
                else:
                    self._rest()
                self._outbox.flush()
                self._outbox.tick()
                self._end_orphans()
                self._pulse.touch(stepped or not self._engine.live.requests)
                if not self._heartbeats.is_alive():
                    raise RuntimeError("the heartbeats have stopped")
        except DeviceLostError as error:
            self._log.error("device_lost", error=str(error), requests=len(self._engine.live.requests))
            raise
        finally:
            self._close()

    def _rest(self) -> None:
        soon = self._outbox.waiting or self._quarantined is not None
        if self._mailbox.waiting or self._inbox.wait(FULL_LANE_SECONDS if soon else REST_SECONDS):
            return
        if not self._checked and not self._engine.live.requests:
            self._checked = True
            try:
                self._engine.check()
            except CacheCorruptError as error:
                self._log.error("cache_corrupt", error=str(error))

    def _end_orphans(self) -> None:
        """Requests that nobody waits for: their router has been silent for long, or another one took its place."""
        if orphans := self._mailbox.take_orphans():
            self._end_where("restarted", lambda spec: (spec.request, spec.attempt) in orphans)
        now = time.monotonic()
        if now < self._orphans_at:
            return
        self._orphans_at = now + ORPHAN_CHECK_SECONDS
        routers = self._listeners.recent()
        self._end_where("silent", lambda spec: spec.router not in routers)

    def _tell_of_quarantine(self) -> None:
        holder = self._engine.intake.quarantine.look()
        if holder != self._quarantined:
            self._quarantined = holder
            self._heartbeats.hurry()

    def _end_where(self, why: str, orphaned: Callable[[Submit], bool]) -> None:
        # An error, not an abort: a router that waits for it after all goes on elsewhere.
        fault = Fault(ErrorCode.ROWS_LOST.name, f"the engine took the router for {why}")
        if ended := self._engine.end_where(orphaned, fault):
            self._log.warning(f"router_{why}", requests=ended)

    def _drained(self) -> bool:
        """Whether it may exit. New requests can still arrive for a few heartbeats after the stop; they are refused."""
        if not self._stopping:
            return False
        now = time.monotonic()
        if self._draining_since is None:
            self._draining_since = now
            self._mailbox.draining = True
            self._log.info("draining", requests=len(self._engine.live.requests))
        seconds = now - self._draining_since
        if seconds >= self._settings.drain_timeout:
            fault = Fault(ErrorCode.DRAINING.name, "the engine has shut down")
            self._log.info("drain_timeout", ended=self._engine.end_all(fault))
            return True
        left = self._engine.live.requests or self._outbox.flowing(STUCK_SECONDS)
        return not left and seconds >= LEAVE_SECONDS

    def _close(self) -> None:
        self._heartbeats.stop()
        if self._callback is not None:
            self._callback.stop()
        if self._status is not None:
            self._status.close()
        self._outbox.close(LINGER_SECONDS)
        self._log.info(
            "stopped",
            iterations=self._engine.stats.latest.iteration,
            gaps=self._inbox.gaps,
            malformed=self._inbox.malformed,
            dropped=dict(self._mailbox.dropped),
            unknown_cancels=self._engine.intake.unknown_stops,
            rows_lost=self._outbox.lost,
        )
        self._inbox.close()
        self._context.term()

    def _make_callback(self) -> StatsCallback | None:
        name = self._settings.stats_callback
        if not name:
            return None
        function, model = find_function(name), self.terms.fingerprint
        return StatsCallback(function, self._settings.id, model, lambda: self._stopping, self._reports, self._log)

    def _serve_status(self) -> StatusServer | None:
        settings = self._settings
        if not settings.metrics_port:
            return None
        health = Health(
            self._pulse,
            settings.live_stall,
            settings.ready_stall,
            lambda: "it is draining" if self._stopping else None,
        )
        return StatusServer(registry_of(self._read_metrics), health, settings.metrics_host, settings.metrics_port)

    def _read_metrics(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield from metrics.requests(stats, self._mailbox)
        yield from metrics.steps(stats)
        yield from metrics.memory(stats)
        yield from metrics.ring(self._inbox, self._mailbox, self._outbox)
        yield from metrics.callback(self._callback)
        yield from metrics.log()

    def _receive(self) -> list[Submit | Cancel | Hello]:
        found: list[Submit | Cancel | Hello] = []
        for message in self._inbox.receive():
            if isinstance(message, Hello):
                if self._listeners.is_new(message):
                    found.append(message)
                if not self._listeners.hear(message):
                    self._mailbox.dropped["too_many_routers"] += 1
            elif isinstance(message, Gap):
                self._miss(message)
            elif isinstance(message, Flush):
                self._flush(message)
            else:
                found.append(message)
        return found

    def _miss(self, gap: Gap) -> None:
        if gap.met:
            self._log.warning("gap", lane=gap.lane, missed=gap.missed)
        else:
            self._log.info("lane taken over", lane=gap.lane, frames=gap.missed)
        missed = {lane: count for lane, count in self._missed.items() if lane != gap.lane}
        missed[gap.lane] = self._missed.get(gap.lane, 0) + gap.missed
        self._missed = dict(list(missed.items())[-MAX_LANES_TOLD:])

    def _flush(self, message: Flush) -> None:
        if message.engine_epoch == self.epoch:
            blocks = self._engine.flush_cache()
            self._flushes = [*self._flushes, (message.number, blocks)][-MAX_FLUSHES_TOLD:]
            self._log.info("cache_flushed", blocks=blocks)

    def _open_lane(self, address: str) -> Lane:
        try:
            return Lane(self._context, address, security=self._security.to("detok"))
        except zmq.ZMQError as error:
            raise ValueError(f"{address!r} is no address: {error}") from error

    def _heartbeat(self) -> EngineHeartbeat:
        """Called from the thread of the heartbeats: reads what is replaced whole."""
        return EngineHeartbeat(
            engine=self._settings.id,
            epoch=self.epoch,
            address=self.address,
            fingerprint=self.terms.fingerprint,
            max_sequence_tokens=self.terms.max_sequence_tokens,
            draining=self._stopping,
            stats=self._engine.stats.latest,
            flushes=self._flushes,
            missed=self._missed,
            tokenizer=self._tokenizer,
            max_batch_size=self._settings.max_batch_size,
            progress=self._pulse.turns,
            cut_off=self._outbox.cut_off,
            quarantine=self._engine.intake.quarantine.holder,
        )

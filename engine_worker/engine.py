"""The engine: take, schedule, run, commit, emit, in one thread. It knows neither sockets nor addresses nor tensors."""

from collections.abc import Callable

from structlog.stdlib import BoundLogger

from engine_worker.hooks import Hooks, Report
from engine_worker.intake import Intake
from engine_worker.kvcache.cache import KvCache
from engine_worker.live import Live
from engine_worker.planning import Part, parts_of, step_of
from engine_worker.scheduling.simple import RequestScheduler, Schedule
from engine_worker.stats import Stats
from engine_worker.step import Drawn, Move, Runner
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.wire import CacheNews, Submit

STEP_FAILED = Fault(ErrorCode.STEP_FAILED.name, "the engine failed at this request; its log has the details")


class Engine:
    """The parts around the loop are its attributes: `intake`, `live`, `stats`."""

    def __init__(
        self,
        hooks: Hooks,
        intake: Intake,
        live: Live,
        scheduler: RequestScheduler,
        runner: Runner,
        cache: KvCache,
        stats: Stats,
        clock: Callable[[], float],
        log: BoundLogger,
    ) -> None:
        """`clock` counts seconds and never goes back."""
        self.intake = intake
        self.live = live
        self.stats = stats
        self._hooks = hooks
        self._scheduler = scheduler
        self._runner = runner
        self._cache = cache
        self._clock = clock
        self._log = log

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to compute."""
        start = self._take()
        schedule, parts = self._schedule(start)
        moves = self._cache.take_moves() if parts else ()
        drawn = self._run(parts, moves)
        end = self._commit(parts, moves, drawn)
        self._emit(schedule, drawn, start, end)
        return bool(parts)

    def check(self) -> None:
        """Raise CacheCorrupt unless the block pool's books balance. For when there is nothing else to do."""
        self._cache.check()

    def cache_news(self, heard: int) -> CacheNews | None:
        """What changed in the prefix cache after change number `heard`; None where nothing did. Safe in any thread."""
        return self._cache.tiers.journal.since(heard)

    def flush_cache(self) -> int:
        """Forget the prefix cache; returns the number of blocks freed."""
        return self._cache.flush()

    def end_where(self, orphaned: Callable[[Submit], bool]) -> int:
        """End the requests that are `orphaned` with ABORTED; returns how many those were."""
        requests, now = [r for r in self.live.requests.values() if orphaned(r.spec)], self._clock()
        for request in requests:
            self.live.end_request(request, FinishReason.ABORTED, now)
        return len(requests)

    def end_all(self, fault: Fault) -> int:
        """End whatever lives with an error; returns how many requests that were."""
        requests, now = list(self.live.requests.values()), self._clock()
        for request in requests:
            self.live.end_request(request, FinishReason.ERROR, now, fault=fault)
        self._respond()
        self._report(self.stats.rested(now))
        return len(requests)

    def _take(self) -> float:
        now = self._clock()
        self.intake.take(self._hooks.get_requests(self.intake.room), now)
        self.intake.stop(self._hooks.poll_stop_ids(), now)
        self.live.expire(now)
        return now

    def _schedule(self, now: float) -> tuple[Schedule, list[Part]]:
        schedule = self._scheduler.schedule(self.live.active)
        for sequence, _ in schedule.context:
            request = sequence.request
            if request.scheduled_at is None:
                self.live.open(request, sequence.num_computed, now)
                request.cached_tokens = sequence.num_computed
                self._cache.note_prompt(request.num_prompt, sequence.num_computed)
        return schedule, parts_of(schedule)

    def _run(self, parts: list[Part], moves: tuple[Move, ...]) -> list[Drawn] | None:
        """What was drawn, one per drawer; None where the step failed."""
        if not parts:
            return []
        try:
            drawn = self._runner.run(step_of(parts, moves))
            if len(drawn) != sum(len(part.drawers) for part in parts):
                raise RuntimeError(f"the runner drew {len(drawn)} tokens")
        except Exception:  # noqa: BLE001 - whatever it was, only the sequences of this step pay for it
            self._log.exception("step_failed", requests=sorted({part.sequence.request.spec.name for part in parts}))
            return None
        return drawn

    def _commit(self, parts: list[Part], moves: tuple[Move, ...], drawn: list[Drawn] | None) -> float:
        now = self._clock()
        if drawn is None:
            self._fail(parts, moves, now)
            return now
        results = iter(drawn)
        for sequence, num_tokens, drawers in parts:
            self._cache.commit(sequence, num_tokens)
            for drawer in drawers:
                result = next(results)
                if result.fault is None:
                    self.live.append(drawer, result.token, result.logprob, now)
                else:
                    self.live.end(drawer, FinishReason.ERROR, now, fault=result.fault)
        return now

    def _fail(self, parts: list[Part], moves: tuple[Move, ...], now: float) -> None:
        """Nothing of the step counts. Whoever awaited a prompt that was in it ends with it.

        Others that would have run on blocks which the step was to bring start again.
        """
        for sequence, _, _ in parts:
            awaiting = [] if sequence.output else sequence.request.awaiting()
            for failed in reversed([sequence, *awaiting]):
                self.live.end(failed, FinishReason.ERROR, now, fault=STEP_FAILED)
        self._scheduler.pause(self._cache.undo(moves))

    def _emit(self, schedule: Schedule, drawn: list[Drawn] | None, start: float, end: float) -> None:
        self._respond()
        if schedule.context or schedule.generation:
            self._report(self.stats.stepped(schedule, len(drawn or ()), start, end))
        else:
            self._report(self.stats.rested(end))

    def _respond(self) -> None:
        responses = self.live.take_responses()
        if responses:
            self._hooks.send_responses(responses)

    def _report(self, report: Report) -> None:
        if report:
            self._hooks.report_stats(report)

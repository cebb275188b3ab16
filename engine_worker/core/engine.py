"""The engine: take, schedule, launch, collect, commit, emit, in one thread. It knows no sockets, addresses or tensors.

With overlap a step is launched before the results of the one before it are looked at: while the device computes, the
engine commits and emits what came before and plans what comes next. Without, each step is collected at once; all else
is the same.
"""

from collections import deque
from collections.abc import Callable, Container

from structlog.stdlib import BoundLogger

from engine_worker.core.flight import Flight
from engine_worker.core.intake import Intake
from engine_worker.core.live import LiveRequests
from engine_worker.core.planning import Part
from engine_worker.core.stats import Stats
from engine_worker.hooks import Hooks, Report
from engine_worker.kvcache.cache import KvCache
from engine_worker.request import Sequence, State
from engine_worker.scheduling.simple import InFlightError, RequestScheduler, Schedule
from engine_worker.step import Drawn, Runner
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.heartbeats import CacheNews
from sluice.ring.wire import Submit

STEP_FAILED = Fault(ErrorCode.STEP_FAILED.name, "the engine failed at this request; its log has the details")


class Engine:
    """The parts around the loop are its attributes: `intake`, `live`, `stats`."""

    def __init__(
        self,
        hooks: Hooks,
        intake: Intake,
        live: LiveRequests,
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
        self._depth = 1 if runner.overlap else 0
        """Steps that may be in flight while the next is planned. Promises and what follows them are for one at most."""
        self._flights: deque[Flight] = deque()
        self._collected_at = clock()

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to compute. Raises DeviceLostError: it was the last."""
        now, busy = self._take(), bool(self._flights)
        if busy and self._flights[-1].forks:
            self._collect()
        launched = self._launch(now)
        while len(self._flights) > (self._depth if launched else 0):
            self._collect()
        self._respond()
        if not (launched or busy):
            self._report(self.stats.rested(now))
        return launched or busy

    def check(self) -> None:
        """Raise CacheCorrupt unless the block pool's books balance. For when there is nothing else to do."""
        self._cache.check()

    def cache_news(self, heard: int) -> CacheNews | None:
        """What changed in the prefix cache after change number `heard`; None where nothing did. Safe in any thread."""
        return self._cache.tiers.journal.since(heard)

    def flush_cache(self) -> int:
        """Forget the prefix cache; returns the number of blocks freed."""
        return self._cache.flush()

    def end_where(self, orphaned: Callable[[Submit], bool], fault: Fault) -> int:
        """End the requests that are `orphaned` with an error; returns how many those were."""
        requests, now = [r for r in self.live.requests.values() if orphaned(r.spec)], self._clock()
        for request in requests:
            self.live.end_request(request, FinishReason.ERROR, now, fault=fault)
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

    def _launch(self, now: float) -> bool:
        """Plan the next step and set it off; False where there is none."""
        if self.intake.quarantine.holds_back(now):
            return False
        schedule = self._schedule()
        if not (schedule.context or schedule.generation):
            return False
        flight = Flight.launch(self._runner, schedule, self._cache.take_moves(), now)
        self._flights.append(flight)
        for part in flight.parts:
            if part.sequence.request.scheduled_at is None:
                self._begin(part.sequence, now)
        return True

    def _begin(self, sequence: Sequence, now: float) -> None:
        """The first step of a request. One that resumes may find so much in the cache that it generates at once."""
        request = sequence.request
        cached = min(sequence.num_computed, request.num_prompt)
        self.live.schedule(request, cached, now)
        self._cache.note_prompt(request.num_prompt, cached)

    def _schedule(self) -> Schedule:
        try:
            return self._scheduler.schedule(self.live.active)
        except InFlightError:
            self._collect()
            return self._scheduler.schedule(self.live.active)

    def _collect(self, restarting: Container[Sequence] = ()) -> None:
        """The oldest step in flight is through, or is waited for: its results count, but for those `restarting`.

        Where it failed, holders that run on what it was to bring start again, once the step behind it is through too.
        """
        flight = self._flights.popleft()
        drawn = self._results(flight)
        now = self._clock()
        start, self._collected_at = max(flight.start, self._collected_at), now
        if drawn is None:
            num_drawn, lost = 0, self._fail(flight, now)
        else:
            num_drawn, lost = self._commit(flight.parts, drawn, now, restarting), []
        self._report(self.stats.stepped(flight.schedule, num_drawn, start, now))
        if lost:
            while self._flights:
                self._collect(restarting=set(lost))
            self.live.restart(lost)

    def _results(self, flight: Flight) -> list[Drawn] | None:
        try:
            return flight.collect()
        except Exception:  # noqa: BLE001 - whatever it was, only the sequences of this step pay for it
            names = sorted({part.sequence.request.spec.name for part in flight.parts})
            self._log.exception("step_failed", requests=names)
            # Unless the next would fail too: then this process ends, and what lives goes on elsewhere.
            self._runner.check()
            return None

    def _commit(self, parts: list[Part], drawn: list[Drawn], now: float, restarting: Container[Sequence]) -> int:
        """Late results of sequences that have ended meanwhile are dropped. Returns how many tokens sequences got."""
        results, live, commit, ended = iter(drawn), self.live, self._cache.commit, State.ENDED
        num_drawn = 0
        for sequence, num_tokens, drawers in parts:
            sequence.num_inflight -= num_tokens
            if sequence.state is ended:
                live.leave(sequence)
            elif sequence not in restarting:
                commit(sequence, num_tokens)
            for drawer in drawers:
                result = next(results)
                if drawer.state is ended:
                    continue
                if sequence in restarting:
                    drawer.give_up()
                elif result.fault is None:
                    num_drawn += 1
                    live.append(drawer, result.token, result.logprob, now)
                else:
                    live.end(drawer, FinishReason.ERROR, now, fault=result.fault)
        return num_drawn

    def _fail(self, flight: Flight, now: float) -> list[Sequence]:
        """Nothing of the step counts: its sequences end, and who awaited a prompt that was in it.

        Returns others that hold blocks which the step was to bring.
        """
        for sequence, num_tokens, drawers in flight.parts:
            sequence.num_inflight -= num_tokens
            if sequence.state is State.ENDED:
                self.live.leave(sequence)
                for drawer in drawers:
                    drawer.give_up()
                continue
            awaiting = [] if sequence.output else sequence.request.awaiting()
            for failed in reversed([sequence, *awaiting]):
                self.live.end(failed, FinishReason.ERROR, now, fault=STEP_FAILED)
        if not flight.moves:
            return []
        # What comes later may move on what this one was to bring.
        moves = [move for later in (flight, *self._flights) for move in later.moves]
        return self._cache.undo([*moves, *self._cache.take_moves()])

    def _respond(self) -> None:
        responses = self.live.take_responses()
        if responses:
            self._hooks.send_responses(responses)

    def _report(self, report: Report) -> None:
        if report:
            self._hooks.report_stats(report)

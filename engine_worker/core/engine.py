"""The step loop: ingest, schedule, launch, collect, commit, emit, in one thread.

With overlap, a step is launched before the previous one is collected: while the device computes, the engine commits and
emits the previous step and plans the next. Without overlap each step is collected right after its launch; everything
else is the same.
"""

import time
from collections import deque
from collections.abc import Callable, Container

from structlog.stdlib import BoundLogger

from engine_worker.core.beam_rounds import BeamRounds
from engine_worker.core.commit import StepCommitter
from engine_worker.core.intake import Intake
from engine_worker.core.live import LiveRequests
from engine_worker.core.planning import InFlightStep, StepResults, draw_after
from engine_worker.core.refusals import EngineLimits
from engine_worker.core.stats import Stats
from engine_worker.core.tensors import TensorGate
from engine_worker.hooks import Hooks, Report
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.kvcache.keepers import Keepers, KeeperSearches
from engine_worker.lora.pages import AdapterPages
from engine_worker.protocol import Runner
from engine_worker.recompute import choose_recompute
from engine_worker.request import Sequence
from engine_worker.scheduling.build import build_scheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.simple import InFlightError, Schedule
from engine_worker.speculative.draft_model import DraftModel, ModelDrafting
from engine_worker.speculative.drafting import NO_DRAFTS, Drafting
from engine_worker.step import Step
from sluice.settings.engine import Batching
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.requests import Submit

NO_EVICTION = ("guaranteed_no_evict", "static_batch")
"""Capacity schedulers that start a request only if there are blocks for all of it."""


class Engine:
    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        batching: Batching,
        hooks: Hooks,
        clock: Callable[[], float],
        log: BoundLogger,
        keepers: Keepers | None = None,
    ) -> None:
        """`clock`: monotonic seconds. `keepers`: None: no keeper is asked for blocks. Raises ValueError on inconsistent
        limits and on an unusable custom scheduler."""
        searches = None
        if keepers is not None:
            searches = KeeperSearches(keepers, runner.tokens_per_block, lambda: self.stats.context_rate, clock)
        self.cache = _build_cache(runner, batching, clock, searches)
        context = SchedulerContext(
            self.cache,
            batching.max_batch_size,
            batching.max_tokens_per_step,
            batching.chunked_context,
            batching.context_chunking_policy,
        )
        self._scheduler = build_scheduler(batching, context, log)
        model = None
        if runner.draft_context is not None:
            model = ModelDrafting(DraftModel(runner, self.cache, batching.max_tokens_per_step, draw_after, log))
        self.drafting = Drafting(batching.max_tokens_per_step, batching.max_draft_batch, clock, model)
        self.live = LiveRequests(self.cache, runner.adapters)
        self._beams = BeamRounds(self.live, self.cache, batching.max_batch_size)
        self._committer = StepCommitter(self.live, self.cache, self._beams, self.drafting, log)
        self._tensors = TensorGate(self.live.with_tensors, runner.tensors, hooks.tensor_room)
        self.intake = Intake(
            self.live,
            limits,
            runner,
            batching.priority_aging_seconds,
            # Other policies reserve the blocks that a sequence may need until it ends, without counting forks.
            beams=batching.capacity_scheduler_policy == "max_utilization" and batching.scheduler is None,
            chunked=batching.chunked_context,
            recompute=choose_recompute(batching.recompute, runner),
            fetches=self.cache.fetches,
        )
        # A sequence can have one promised token, so at most one step may be in flight while the next is planned.
        self._max_in_flight = 1 if runner.overlap else 0
        self.stats = Stats(
            self.cache,
            self.live,
            self._scheduler,
            limits.max_requests,
            micro_batches=1 + self._max_in_flight,
            unix_zero=time.time() - clock(),
        )
        self._hooks = hooks
        self._runner = runner
        self._clock = clock
        self._log = log
        self._in_flight: deque[InFlightStep] = deque()
        self._collected_at = clock()

    def step(self) -> bool:
        """One iteration; False if there was nothing to compute. Must not be called again after DeviceLostError."""
        now, busy = self._ingest(), bool(self._in_flight)
        # Sequences that await a prompt become schedulable only with that step's results, and drafts can follow only
        # known tokens.
        if busy and self._decides_next(self._in_flight[-1]):
            self._collect()
        launched = self._launch(now)
        while len(self._in_flight) > (self._max_in_flight if launched else 0):
            self._collect()
        self._respond()
        if not (launched or busy):
            self._report(self.stats.record_idle(now))
        return launched or busy

    def end_where(self, condition: Callable[[Submit], bool], fault: Fault) -> int:
        """End the requests that meet `condition` with `fault`; returns their number."""
        # A list, because requests leave `live` as they end.
        requests, now = [r for r in self.live.requests.values() if condition(r.submit)], self._clock()
        for request in requests:
            self.live.end_request(request, FinishReason.ERROR, now, fault=fault)
        return len(requests)

    def end_all(self, fault: Fault) -> int:
        """End every request with `fault` and send the responses; returns their number."""
        count = self.end_where(lambda _: True, fault)
        self._respond()
        self._report(self.stats.record_idle(self._clock()))
        return count

    def _ingest(self) -> float:
        now = self._clock()
        self.intake.ingest(self._hooks.get_requests(self.intake.free_slots), now)
        # After the requests, so that a request and its stop may arrive together.
        self.intake.stop(self._hooks.poll_stop_ids(), now)
        self.live.expire(now)
        self.intake.settle(now)
        return now

    def _decides_next(self, step: InFlightStep) -> bool:
        may_draft = step.schedule.may_draft and self.drafting.may_draft(step.schedule)
        return step.decides_next or may_draft

    def _launch(self, now: float) -> bool:
        """False if nothing is scheduled."""
        if self.intake.quarantine.is_holding(now):
            return False
        schedule = self._schedule()
        if not (schedule.context or schedule.generation):
            if self.cache.tiers.saving:
                self._launch_moves(schedule, now)
            return False
        # After scheduling, which decides on moves and loads.
        moves, adapters = self.cache.tiers.take_moves(), self.cache.adapters
        before = Step((), moves, () if adapters is None else adapters.take_loads())
        step = InFlightStep.launch(self._runner, schedule, self.drafting, before, now, idle=not self._in_flight)
        self._in_flight.append(step)
        if step.plan.kept:
            self._tensors.launched(step.plan.kept)
        for entry in step.plan.entries:
            if entry.sequence.request.scheduled_at is None:
                self._begin(entry.sequence, now)
        return True

    def _launch_moves(self, schedule: Schedule, now: float) -> None:
        """Launch a step without sequences: what is to be saved should not wait for the next request."""
        before = Step((), self.cache.tiers.take_moves())
        idle = not self._in_flight
        self._in_flight.append(InFlightStep.launch(self._runner, schedule, self.drafting, before, now, idle=idle))

    def _begin(self, sequence: Sequence, now: float) -> None:
        """Record the launch of the first step of the sequence's request."""
        request = sequence.request
        # A resumed sequence may find even generated tokens in the cache.
        cached = min(sequence.num_computed, request.num_prompt)
        # The number of the step that was just launched.
        iteration = self.stats.latest.iteration + len(self._in_flight)
        self.live.mark_scheduled(request, cached, iteration, now)
        self.cache.prompt_tokens += request.num_prompt
        self.cache.cached_tokens += cached

    def _schedule(self) -> Schedule:
        self._beams.park()
        self._tensors.update()
        try:
            return self._scheduler.schedule(self.live.active)
        except InFlightError:
            self._collect()
            self._beams.park()
            return self._scheduler.schedule(self.live.active)

    def _collect(self, restarting: Container[Sequence] = ()) -> None:
        """Wait for the oldest in-flight step and commit its results, except those of sequences in `restarting`."""
        step = self._in_flight.popleft()
        results = self._results(step)
        now = self._clock()
        # With overlap the step was planned before the previous one ended: its time counts from that end.
        start, self._collected_at = max(step.start, self._collected_at), now
        if step.plan.kept:
            self._tensors.collected(step.plan.kept)
        committer, to_restart = self._committer, list[Sequence]()
        if results is None:
            num_sampled, to_restart = 0, committer.fail(step, self._in_flight, now)
        else:
            if results.missing:
                committer.end_missing(step, results.missing, now)
            # Before the tokens: a client that has received a token has also received the rows before it.
            if results.prompt_logprobs:
                committer.add_prompt_logprobs(results.prompt_logprobs, restarting)
            if results.tensors:
                committer.add_tensors(results.tensors, restarting)
                # Sent immediately, so that `Hooks.tensor_room` takes them into account before the next step.
                self._respond()
            num_sampled = committer.commit(step.plan.entries, results.drawn, now, restarting)
        drafts = NO_DRAFTS
        if step.schedule.drafting:
            drafts = self.drafting.end_step(step.schedule, step.plan.num_drafted, now - start)
        self._report(self.stats.record_step(step.schedule, num_sampled, drafts, start, now))
        if to_restart:
            # Later in-flight steps still use these sequences' blocks, so wait for them first.
            while self._in_flight:
                self._collect(restarting=set(to_restart))
            self.live.restart(to_restart)
        if committer.postponed:
            self._hold_postponed()

    def _hold_postponed(self) -> None:
        requests = self._committer.take_postponed()
        # Later in-flight steps follow tokens that were not sampled.
        while self._in_flight:
            self._collect(restarting={sequence for request in requests for sequence in request.sequences})
        self.intake.hold(requests)

    def _results(self, step: InFlightStep) -> StepResults | None:
        """None if the step failed. Raises DeviceLostError."""
        try:
            results = step.collect()
        except Exception:  # noqa: BLE001 - only the sequences of this step fail
            names = sorted({entry.sequence.request.submit.name for entry in step.plan.entries})
            self._log.exception("step_failed", requests=names)
            # On a lost device every later step would fail too: end the process, and routers recover its requests.
            self._runner.check()
            return None
        self.cache.tiers.complete(step.before.moves)
        return results

    def _respond(self) -> None:
        responses = self.live.take_responses()
        if responses:
            self._hooks.send_responses(responses)

    def _report(self, report: Report) -> None:
        if report:
            self._hooks.report_stats(report)


def _build_cache(
    runner: Runner, batching: Batching, clock: Callable[[], float], searches: KeeperSearches | None
) -> KvCacheManager:
    return KvCacheManager(
        runner.num_blocks,
        runner.tokens_per_block,
        batching.block_reuse,
        num_host_blocks=runner.num_host_blocks,
        window=runner.window,
        chunk=batching.chunk,
        clock=clock,
        event_buffer=batching.kv_event_buffer,
        adapters=None if runner.adapters is None else AdapterPages(runner.adapters),
        file=runner.pool_file,
        source=runner.pool_folder,
        searches=searches,
        guaranteed=batching.capacity_scheduler_policy in NO_EVICTION,
    )

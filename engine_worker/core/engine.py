"""The step loop: ingest, schedule, launch, collect, commit, emit, in one thread.

With overlap, a step is launched before the previous one is collected: while the device computes, the engine commits and
emits the previous step and plans the next. Without overlap each step is collected at once; all else is the same.
"""

import time
from collections import abc, deque
from collections.abc import Callable, Container, Mapping
from itertools import islice

from structlog.stdlib import BoundLogger

from engine_worker.core.beam_rounds import BeamRounds
from engine_worker.core.intake import Intake, Terms
from engine_worker.core.live import LiveRequests
from engine_worker.core.planning import InFlightStep, StepEntry, StepResults, draw_after
from engine_worker.core.stats import Stats
from engine_worker.core.tensors import TensorGate, responses
from engine_worker.hooks import Hooks, Report
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.lora.pages import AdapterPages
from engine_worker.protocol import Runner
from engine_worker.request import Request
from engine_worker.scheduling.build import build_scheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.simple import InFlightError, Schedule
from engine_worker.sequence import Sequence, State
from engine_worker.speculative.draft_model import DraftModel
from engine_worker.speculative.drafting import Drafting
from engine_worker.speculative.model_drafting import ModelDrafting
from engine_worker.step import Drawn, Step
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.wire import Submit
from sluice.settings.engine import Batching

STEP_FAILED = Fault(ErrorCode.STEP_FAILED.name, "the engine failed while computing this request; see its log")

LOAD_FAILED = Fault(
    ErrorCode.STEP_FAILED.name, "the request's LoRA adapter could not be copied to the device; see the engine's log"
)


class Engine:
    def __init__(
        self,
        runner: Runner,
        terms: Terms,
        batching: Batching,
        hooks: Hooks,
        clock: Callable[[], float],
        log: BoundLogger,
    ) -> None:
        """`clock`: monotonic seconds. Raises ValueError on inconsistent limits and on an unusable custom scheduler."""
        self.cache = KvCacheManager(
            runner.num_blocks,
            runner.tokens_per_block,
            batching.block_reuse,
            num_host_blocks=runner.num_host_blocks,
            window=runner.window,
            chunk=batching.chunk,
            clock=clock,
            event_buffer=batching.kv_event_buffer,
            adapters=None if runner.adapters is None else AdapterPages(runner.adapters),
        )
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
        self._tensors = TensorGate(self.live.with_tensors, runner.tensors, hooks.tensor_room)
        self.intake = Intake(
            self.live,
            terms,
            runner.prepare,
            runner.programs,
            batching.priority_aging_seconds,
            # Other policies count what a sequence may need to its end, and know nothing of forks.
            beams=batching.capacity_scheduler_policy == "max_utilization" and batching.scheduler is None,
            chunked=batching.chunked_context,
        )
        # A sequence can have one promised token whose draw is still in flight, so one step at most may be in flight
        # while the next is planned.
        self._max_in_flight = 1 if runner.overlap else 0
        self.stats = Stats(
            self.cache,
            self.live,
            self._scheduler,
            terms.max_requests,
            micro_batches=1 + self._max_in_flight,
            unix_zero=time.time() - clock(),
        )
        self._hooks = hooks
        self._runner = runner
        self._clock = clock
        self._log = log
        self._in_flight: deque[InFlightStep] = deque()
        self._postponed: dict[Request, None] = {}
        """Requests of draws in the step that is being committed."""
        self._collected_at = clock()

    def step(self) -> bool:
        """One iteration; False if there was nothing to compute. Must not be called again after DeviceLostError."""
        now, busy = self._ingest(), bool(self._in_flight)
        # Sequences that await a prompt become schedulable only with that step's results; drafts follow known tokens.
        if busy and (self._in_flight[-1].decides_next or self.drafting.wants(self._in_flight[-1].schedule)):
            self._collect()
        launched = self._launch(now)
        while len(self._in_flight) > (self._max_in_flight if launched else 0):
            self._collect()
        self._respond()
        if not (launched or busy):
            self._report(self.stats.record_idle(now))
        return launched or busy

    def end_where(self, condition: Callable[[Submit], bool], fault: Fault) -> int:
        """End the requests that meet `condition` with an error; returns their number."""
        # A list, because requests leave `live` as they end.
        requests, now = [r for r in self.live.requests.values() if condition(r.spec)], self._clock()
        for request in requests:
            self.live.end_request(request, FinishReason.ERROR, now, fault=fault)
        return len(requests)

    def end_all(self, fault: Fault) -> int:
        """End every request with an error and send the responses; returns their number."""
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

    def _launch(self, now: float) -> bool:
        """False if nothing is scheduled."""
        if self.intake.quarantine.is_holding(now):
            return False
        schedule = self._schedule()
        if not (schedule.context or schedule.generation):
            return False
        # Moves are taken after scheduling, which decides them.
        moves, adapters = self.cache.tiers.take_moves(), self.cache.adapters
        before = Step((), moves, () if adapters is None else adapters.take_loads())
        step = InFlightStep.launch(self._runner, schedule, self.drafting, before, now, idle=not self._in_flight)
        self._in_flight.append(step)
        if step.kept:
            self._tensors.launched(step.kept)
        for entry in step.entries:
            if entry.sequence.request.scheduled_at is None:
                self._begin(entry.sequence, now)
        return True

    def _begin(self, sequence: Sequence, now: float) -> None:
        """The first step of its request."""
        request = sequence.request
        # A resumed sequence may find even generated tokens in the cache.
        cached = min(sequence.num_computed, request.num_prompt)
        # Of the step that is now the last in flight.
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
        if step.kept:
            self._tensors.collected(step.kept)
        if results is None:
            num_drawn, lost = 0, self._fail(step, now)
        else:
            if results.missing:
                self._end_missing(step, results.missing, now)
            # Before the tokens: whoever has a token has these too.
            if results.prompt_logprobs:
                self._respond_scored(results, restarting)
            if results.tensors:
                self._respond_tensors(results, restarting)
            num_drawn, lost = self._commit(step.entries, results.drawn, now, restarting), []
        drafts = self.drafting.end_step(step.schedule, step.num_drafted, now - start)
        self._report(self.stats.record_step(step.schedule, num_drawn, drafts, start, now))
        if lost:
            # The steps behind it still use these sequences' blocks, so they restart only when those have ended.
            while self._in_flight:
                self._collect(restarting=set(lost))
            self.live.restart(lost)
        if self._postponed:
            self._hold_postponed()

    def _hold_postponed(self) -> None:
        requests, self._postponed = list(self._postponed), {}
        # The steps behind this one follow tokens that were not drawn.
        while self._in_flight:
            self._collect(restarting={sequence for request in requests for sequence in request.sequences})
        self.intake.hold(requests)

    def _results(self, step: InFlightStep) -> StepResults | None:
        """None if the step failed. Raises DeviceLostError."""
        try:
            return step.collect()
        except Exception:  # noqa: BLE001 - whatever went wrong, only the sequences of this step fail
            names = sorted({entry.sequence.request.spec.name for entry in step.entries})
            self._log.exception("step_failed", requests=names)
            # On a lost device every later step would fail too: end the process, and routers recover its requests.
            self._runner.check()
            return None

    def _respond_scored(self, results: StepResults, restarting: Container[Sequence]) -> None:
        for entry, data in results.prompt_logprobs:
            sequence, scored = entry.sequence, entry.scored
            if scored is not None and sequence.state is not State.ENDED and sequence not in restarting:
                self.live.add_prompt_logprobs(sequence.request, scored, data)

    def _respond_tensors(self, results: StepResults, restarting: Container[Sequence]) -> None:
        for entry, rows in results.tensors:
            if entry.sequence.request.num_live and entry.sequence not in restarting:
                self.live.add_tensors(responses(entry.sequence, entry.drawers, entry.kept, rows))
        # At once, so that the room for further ones is known.
        self._respond()

    def _commit(self, entries: list[StepEntry], drawn: list[Drawn], now: float, restarting: Container[Sequence]) -> int:
        """Advance the sequences of a step, except those that have ended since; returns the number of new tokens."""
        # Local names, because the loop runs for every sequence in every step.
        results, live, commit, ended = iter(drawn), self.live, self.cache.commit, State.ENDED
        num_drawn = 0
        for entry in entries:
            sequence, num_tokens, drafts = entry.sequence, entry.num_tokens, entry.drafts
            sequence.num_inflight -= num_tokens
            if drafts and sequence.state is not ended and sequence not in restarting:
                num_drawn += self._commit_drafts(sequence, drafts, list(islice(results, num_tokens)), now)
                continue
            # Of one that has ended or restarts, no guess counts.
            for _ in drafts:
                next(results)
            if sequence.state is ended:
                live.release_ended(sequence)
            elif sequence not in restarting:
                commit(sequence, num_tokens)
            for drawer in entry.drawers:
                result = next(results)
                if drawer.state is ended:
                    continue
                if sequence in restarting:
                    drawer.drop_promise()
                elif result.drew:
                    num_drawn += 1
                    live.append(drawer, result.token, result.logprob, now)
                else:
                    num_drawn += self._commit_without_token(drawer, result, now)
        return num_drawn

    def _commit_drafts(self, sequence: Sequence, drafts: abc.Sequence[int], drawn: list[Drawn], now: float) -> int:
        """Each guess that equals the draw before it is a token, and has a draw of its own. Returns the number of new
        tokens. What was computed behind them is findable by nobody, and will be written over."""
        accepted = 0
        while accepted < len(drafts) and drawn[accepted].drew and drawn[accepted].token == drafts[accepted]:
            accepted += 1
        last = drawn[accepted]
        drawn = drawn[: accepted + last.drew]
        reason = FinishReason.RUNNING
        for count, result in enumerate(drawn, 1):
            sequence.append(result.token)
            reason = sequence.finish_reason()
            if reason is not FinishReason.RUNNING:
                del drawn[count:]
        accepted = min(accepted, len(drawn))
        # The newest token and the accepted guesses; of the last draw nothing is computed yet.
        self.cache.commit(sequence, len(drawn))
        self.drafting.record(sequence, len(drafts), accepted)
        if drawn:
            self.live.extend(sequence, drawn, accepted, reason, now)
        if not last.drew:
            self._commit_without_token(sequence, last, now)
        return len(drawn)

    def _commit_without_token(self, sequence: Sequence, result: Drawn, now: float) -> int:
        """The draw brought a beam's candidates, the end, or has to be made again. Returns the number of draws that
        count."""
        if result.best:
            self._beams.deliver(sequence, result, now)
            return 1
        if sequence.forced is not None:
            self.live.end_forced(sequence, now)
        elif result.postponed:
            # Not if a guess before it was a token, which was the promised one.
            if sequence.num_promised or sequence.request.search is not None:
                sequence.drop_promise()
            self._postponed[sequence.request] = None
        elif result.fault is not None:
            self.live.end(sequence, FinishReason.ERROR, now, fault=result.fault)
        else:
            self.live.end(sequence, FinishReason.EOS, now, by_guide=True)
        return 0

    def _fail(self, step: InFlightStep, now: float) -> list[Sequence]:
        """End the sequences of a failed step; returns others that hold blocks which its moves should have filled."""
        for entry in step.entries:
            sequence = entry.sequence
            sequence.num_inflight -= entry.num_tokens
            if sequence.state is State.ENDED:
                self.live.release_ended(sequence)
                for drawer in entry.drawers:
                    drawer.drop_promise()
                continue
            awaiting = [] if sequence.output else sequence.request.awaiting()
            # Those that await this one's prompt first: otherwise its end would activate the next of them.
            for failed in reversed([sequence, *awaiting]):
                self.live.end(failed, FinishReason.ERROR, now, fault=STEP_FAILED)
        if step.loads and self.cache.adapters is not None:
            self.cache.adapters.requeue(step.loads)
        if not step.moves:
            return []
        # Later moves may have read what the failed ones should have written, so all of them are undone together.
        moves = [move for later in (step, *self._in_flight) for move in later.moves]
        return self.cache.undo([*moves, *self.cache.tiers.take_moves()])

    def _end_missing(self, step: InFlightStep, missing: Mapping[int, str], now: float) -> None:
        """End the requests whose adapter is not on the device; what the step computed for them is dropped."""
        requests = dict.fromkeys(each.sequence.request for each in step.entries if each.sequence.adapter in missing)
        names = sorted(request.spec.name for request in requests)
        self._log.error("adapter_load_failed", requests=names, reasons=sorted(set(missing.values())))
        for request in requests:
            self.live.end_request(request, FinishReason.ERROR, now, fault=LOAD_FAILED)
        if self.cache.adapters is not None:
            self.cache.adapters.requeue(load for load in step.loads if load.number in missing)

    def _respond(self) -> None:
        responses = self.live.take_responses()
        if responses:
            self._hooks.send_responses(responses)

    def _report(self, report: Report) -> None:
        if report:
            self._hooks.report_stats(report)

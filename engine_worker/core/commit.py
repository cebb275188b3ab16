"""Applies the results of a collected step to its sequences: new tokens, ends and failures."""

from collections import abc
from collections.abc import Container, Iterable, Mapping
from itertools import islice

from structlog.stdlib import BoundLogger

from engine_worker.core.beam_rounds import BeamRounds
from engine_worker.core.live import LiveRequests
from engine_worker.core.planning import InFlightStep, StepEntry
from engine_worker.core.tensors import tensor_messages
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request, Sequence, State
from engine_worker.speculative.drafting import Drafting
from engine_worker.step import Drawn, KeptRows
from sluice.wire.errors import ErrorCode, Fault, FinishReason

STEP_FAILED = Fault(ErrorCode.STEP_FAILED.name, "the engine failed while computing this request; see its log")
LOAD_FAILED = Fault(
    ErrorCode.STEP_FAILED.name, "the request's LoRA adapter could not be copied to the device; see the engine's log"
)


class StepCommitter:
    """The only code that advances sequences by what a step computed.

    `restarting` in its methods: sequences that will compute their tokens again, so that their results do not count.
    """

    def __init__(
        self, live: LiveRequests, cache: KvCacheManager, beams: BeamRounds, drafting: Drafting, log: BoundLogger
    ) -> None:
        self.postponed: dict[Request, None] = {}
        """Requests whose sampling the runner has postponed since the last `take_postponed`."""
        self._live = live
        self._cache = cache
        self._beams = beams
        self._drafting = drafting
        self._log = log

    def take_postponed(self) -> list[Request]:
        requests, self.postponed = list(self.postponed), {}
        return requests

    def add_prompt_logprobs(
        self, prompt_logprobs: Iterable[tuple[StepEntry, bytes]], restarting: Container[Sequence]
    ) -> None:
        for entry, data in prompt_logprobs:
            sequence, scored = entry.sequence, entry.scored
            if scored is not None and sequence.state is not State.ENDED and sequence not in restarting:
                self._live.add_prompt_logprobs(sequence.request, scored, data)

    def add_tensors(
        self, tensors: Iterable[tuple[StepEntry, list[list[KeptRows]]]], restarting: Container[Sequence]
    ) -> None:
        for entry, rows in tensors:
            if entry.sequence.request.num_live and entry.sequence not in restarting:
                self._live.add_tensors(tensor_messages(entry.sequence, entry.samplers, entry.kept, rows))

    def commit(
        self, entries: Iterable[StepEntry], drawn: Iterable[Drawn], now: float, restarting: Container[Sequence]
    ) -> int:
        """Advance the sequences of a step, except those that have ended since; returns the number of new tokens."""
        # Local names, because the loop runs for every sequence in every step.
        results, live, commit, ended = iter(drawn), self._live, self._cache.commit, State.ENDED
        num_sampled = 0
        for entry in entries:
            sequence, num_tokens, drafts = entry.sequence, entry.num_tokens, entry.drafts
            sequence.num_inflight -= num_tokens
            if drafts and sequence.state is not ended and sequence not in restarting:
                num_sampled += self._commit_drafts(sequence, drafts, list(islice(results, num_tokens)), now)
                continue
            # The sequence has ended or restarts: skip the results of its draft tokens.
            for _ in drafts:
                next(results)
            if sequence.state is ended:
                live.release_ended(sequence)
            elif sequence not in restarting:
                commit(sequence, num_tokens)
            for sampler in entry.samplers:
                result = next(results)
                if sampler.state is ended:
                    continue
                if sequence in restarting:
                    sampler.drop_promise()
                elif result.has_token:
                    num_sampled += 1
                    live.append(sampler, result.token, result.logprob, now)
                else:
                    num_sampled += self._commit_without_token(sampler, result, now)
        return num_sampled

    def fail(self, step: InFlightStep, later: Iterable[InFlightStep], now: float) -> list[Sequence]:
        """End the sequences of a failed step. `later`: the steps launched after it. Returns other sequences whose
        blocks lack content that the failed moves should have copied."""
        live, cache = self._live, self._cache
        for entry in step.plan.entries:
            sequence = entry.sequence
            sequence.num_inflight -= entry.num_tokens
            if sequence.state is State.ENDED:
                live.release_ended(sequence)
                for sampler in entry.samplers:
                    sampler.drop_promise()
                continue
            awaiting = [] if sequence.output else sequence.request.awaiting()
            # Those that await this one's prompt first: otherwise its end would activate the next of them.
            for failed in reversed([sequence, *awaiting]):
                live.end(failed, FinishReason.ERROR, now, fault=STEP_FAILED)
        if step.before.loads and cache.adapters is not None:
            cache.adapters.requeue(step.before.loads)
        if not step.before.moves:
            return []
        # Later moves may have read what the failed ones should have written, so all of them are undone together.
        moves = [*step.before.moves, *cache.tiers.drop_moves()]
        cache.tiers.ended(step.before.moves)
        return cache.undo(moves, [move for each in later for move in each.before.moves])

    def end_missing(self, step: InFlightStep, missing: Mapping[int, str], now: float) -> None:
        """End the requests whose adapter is not on the device; what the step computed for them is dropped. `missing`:
        see `Launched.missing_adapters`."""
        requests = dict.fromkeys(
            entry.sequence.request for entry in step.plan.entries if entry.sequence.adapter_slot in missing
        )
        names = sorted(request.submit.name for request in requests)
        self._log.error("adapter_load_failed", requests=names, reasons=sorted(set(missing.values())))
        for request in requests:
            self._live.end_request(request, FinishReason.ERROR, now, fault=LOAD_FAILED)
        if self._cache.adapters is not None:
            self._cache.adapters.requeue(load for load in step.before.loads if load.number in missing)

    def _commit_drafts(self, sequence: Sequence, drafts: abc.Sequence[int], drawn: list[Drawn], now: float) -> int:
        """Accept the draft tokens that equal the token sampled in their place, up to the first that does not, and add
        the token sampled after them. Returns the number of new tokens.

        Keys and values of rejected draft tokens remain after the computed tokens: they are never published, and
        the next slice overwrites them.
        """
        accepted = 0
        while accepted < len(drafts) and drawn[accepted].has_token and drawn[accepted].token == drafts[accepted]:
            accepted += 1
        last = drawn[accepted]
        drawn = drawn[: accepted + last.has_token]
        reason = FinishReason.RUNNING
        for count, result in enumerate(drawn, 1):
            sequence.append(result.token)
            reason = sequence.finish_reason()
            if reason is not FinishReason.RUNNING:
                del drawn[count:]
        accepted = min(accepted, len(drawn))
        # The previous newest token and the accepted draft tokens: the last sampled token is not computed yet.
        self._cache.commit(sequence, len(drawn))
        self._drafting.record(sequence, len(drafts), accepted)
        if drawn:
            self._live.extend(sequence, drawn, accepted, reason, now)
        if not last.has_token:
            self._commit_without_token(sequence, last, now)
        return len(drawn)

    def _commit_without_token(self, sequence: Sequence, result: Drawn, now: float) -> int:
        """Apply a result that is no token: candidates of a beam, an end, a fault or a postponement. Returns 1 if it
        counts as a sampled token, else 0."""
        if result.best:
            self._beams.deliver(sequence, result, now)
            return 1
        if sequence.forced is not None:
            self._live.end_forced(sequence, now)
        elif result.postponed:
            # If draft tokens were accepted before it, the first of them was the promised token.
            if sequence.num_promised or sequence.request.search is not None:
                sequence.drop_promise()
            self.postponed[sequence.request] = None
        elif result.fault is not None:
            self._live.end(sequence, FinishReason.ERROR, now, fault=result.fault)
        else:
            self._live.end(sequence, FinishReason.EOS, now, by_guide=True)
        return 0

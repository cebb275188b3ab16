"""Draft tokens by a draft model: a second, smaller model that computes the same sequences in the same blocks.

It computes a sequence only when it drafts for it: `Sequence.num_draft_computed` and `Stored.drafted` record how far it
has computed, and it computes the rest before the next draft. If these were wrong, drafts would be worse, but the output
would not change.
"""

from collections import abc
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from structlog.stdlib import BoundLogger

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.protocol import Runner
from engine_worker.request import Sequence
from engine_worker.speculative.cost import Gain
from engine_worker.speculative.drafter import Drafter
from engine_worker.step import Draw, Drawn, Slice

MAX_FAILURES = 3
"""Failures in a row after which the draft model is no longer used."""
NEWEST = 4
"""Tokens to compute beyond which a sequence counts as behind."""

DrawAfter = Callable[[Sequence, abc.Sequence[int]], Draw]
"""Returns the draw of a sequence that follows its known tokens and these draft tokens."""


class DraftModel:
    def __init__(
        self, runner: Runner, cache: KvCacheManager, max_tokens_per_step: int, draw_after: DrawAfter, log: BoundLogger
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._max_tokens_per_step = max_tokens_per_step
        self._draw_after = draw_after
        self._log = log
        self._context = runner.draft_context or 0
        self._failures = 0
        self._ends: dict[Sequence, int] = {}
        """By sequence with drafts in the latest step: tokens that the draft model has computed, draft tokens included.
        """
        self.was_behind = False
        """Whether the latest drafts took longer because the draft model had to catch up on a sequence."""

    def room(self, sequence: Sequence) -> int:
        """Limit on the tokens that it can draft for a sequence."""
        if self._failures >= MAX_FAILURES or not self._cache.keeps_drafted(sequence):
            return 0
        if sequence.request.virtual is not None:
            # Rows of prompt tables are embeddings of the target model, not of the draft model.
            return 0
        return self._context - sequence.num_tokens

    def propose(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Draft at most `lengths` tokens for each sequence; none for sequences on which it has not caught up yet. The
        sequences must have room in their blocks for the draft tokens, and no promised token. Raises DeviceLostError."""
        self.was_behind = False
        self._ends.clear()
        try:
            drafts = self._draft(lengths)
        except Exception:  # noqa: BLE001 - the output is the same without drafts
            self._failures += 1
            names = sorted({sequence.request.submit.name for sequence in lengths})
            self._log.exception("draft_model_failed", requests=names, gave_up=self._failures >= MAX_FAILURES)
            self._runner.check()
            return {}
        self._failures = 0
        return drafts

    def commit(self, sequence: Sequence) -> None:
        """Record what the draft model has computed of a sequence, once the step with its drafts was committed."""
        end = self._ends.pop(sequence, None)
        if end is not None:
            self._cache.commit_drafted(sequence, end)

    def _draft(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts: dict[Sequence, list[int]] = {}
        unfinished = self._draft_first(lengths, drafts)
        while unfinished:
            slices = [self._next_slice(sequence, drafts[sequence]) for sequence in unfinished]
            drawn = dict(zip(unfinished, self._runner.draft(slices), strict=True))
            for sequence in unfinished:
                self._ends[sequence] += 1
            unfinished = [sequence for sequence in unfinished if self._add(sequence, drawn[sequence], lengths, drafts)]
        return {sequence: tokens for sequence, tokens in drafts.items() if tokens}

    def _draft_first(self, lengths: Mapping[Sequence, int], drafts: dict[Sequence, list[int]]) -> list[Sequence]:
        """Catch up on the sequences, as far as fits in a step, and draft the first token of each. Returns the sequences
        whose drafts are not finished."""
        budget, ends, slices = self._max_tokens_per_step, {}, []
        for sequence in lengths:
            # The newest token is always computed, because its logits are needed.
            start = min(sequence.num_draft_computed, sequence.num_tokens - 1)
            end = min(sequence.num_tokens, start + budget)
            if start < end:
                budget -= end - start
                ends[sequence] = end
                self.was_behind |= end - start > NEWEST
                slices.append(self._slice(sequence, start, end))
        drawn = iter(self._runner.draft(slices))
        unfinished = []
        for sequence, end in ends.items():
            self._cache.commit_drafted(sequence, end)
            if end == sequence.num_tokens:
                drafts[sequence], self._ends[sequence] = [], end
                if self._add(sequence, next(drawn), lengths, drafts):
                    unfinished.append(sequence)
        return unfinished

    def _slice(self, sequence: Sequence, start: int, end: int) -> Slice:
        draws = (self._draw(sequence, ()),) if end == sequence.num_tokens else ()
        return Slice(sequence.tokens_between(start, end), start, sequence.blocks, draws)

    def _next_slice(self, sequence: Sequence, drafted: list[int]) -> Slice:
        start, draws = sequence.num_tokens + len(drafted) - 1, (self._draw(sequence, drafted),)
        return Slice(drafted[-1:], start, sequence.blocks, draws)

    def _draw(self, sequence: Sequence, drafted: abc.Sequence[int]) -> Draw:
        draw = self._draw_after(sequence, drafted)
        if draw.sampling.logprobs is None:
            return draw
        return replace(draw, sampling=replace(draw.sampling, logprobs=None))

    def _add(
        self, sequence: Sequence, drawn: Drawn, lengths: Mapping[Sequence, int], drafts: Mapping[Sequence, list[int]]
    ) -> bool:
        """Add a sampled token to the draft of a sequence; returns whether another one should follow."""
        if not drawn.has_token:
            return False
        drafts[sequence].append(drawn.token)
        return len(drafts[sequence]) < lengths[sequence] and drawn.token not in sequence.request.stops


class ModelDrafting:
    """Decides about drafts by the draft model. Their costs and accuracies are kept apart from those of other drafts,
    because they include the draft model's time."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.gain = Gain()
        self.used = False
        """Whether the draft model has computed for the latest step."""

    def may_draft(self, sequence: Sequence, batch_size: int) -> bool:
        """Whether it may draft for the sequence once its newest token is known."""
        cost, drafter = self.gain.cost.of(batch_size), sequence.drafter
        if cost is None or self._model.room(sequence) < 1:
            return False
        return drafter is None or drafter.model_pace is None or drafter.model_pace.length(cost.token) > 0

    def propose(
        self, drafters: Mapping[Sequence, Drafter], batch_size: int, budget: int, *, idle: bool
    ) -> dict[Sequence, abc.Sequence[int]]:
        """The drafts of a step: at most `budget` tokens together, and none unless `idle`."""
        self.used = False
        cost = self.gain.cost.of(batch_size)
        if cost is None:
            return {}
        lengths = self._lengths(drafters, cost.token, budget)
        expected = sum(_expects(drafters[sequence], length) for sequence, length in lengths.items())
        if not idle or not lengths or not self.gain.pays(cost, expected, sum(lengths.values())):
            return {}
        self.used = True
        drafts = self._model.propose(lengths)
        for sequence in drafts:
            drafters[sequence].by_model = True
        self.gain.expect(sum(_expects(drafters[sequence], len(tokens)) for sequence, tokens in drafts.items()))
        return dict(drafts)

    def record(self, sequence: Sequence, accepted: int) -> None:
        """Record the result of a sequence's draft, after its step was committed."""
        self._model.commit(sequence)
        self.gain.record(accepted)

    def record_time(self, batch_size: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step without context. `drafted`: its draft tokens."""
        # Steps in which the draft model had to catch up, or which have other drafts, say nothing about the cost.
        representative = drafted > 0 and not self._model.was_behind if self.used else not drafted
        if representative:
            self.gain.cost.record(batch_size, drafted, seconds)

    def _lengths(self, drafters: Mapping[Sequence, Drafter], token_cost: float, budget: int) -> dict[Sequence, int]:
        lengths = {}
        for sequence, drafter in drafters.items():
            pace = drafter.model_pace
            if pace is None or drafter.follows(sequence.output):
                continue
            length = pace.length(token_cost)
            if not length:
                pace.forget()
            length = min(length, budget, room_of(sequence), self._model.room(sequence))
            if length > 0:
                lengths[sequence] = length
                budget -= length
        return lengths


def room_of(sequence: Sequence) -> int:
    """Draft tokens that fit in its blocks and within max_tokens; 0 unless its newest token is known."""
    if sequence.num_promised or sequence.num_inflight:
        return 0
    # One token is sampled after the last draft token.
    return min(sequence.num_placed - sequence.num_tokens, sequence.request.max_tokens - sequence.num_tokens - 1)


def _expects(drafter: Drafter, drafted: int) -> float:
    """Expected number of accepted tokens of a draft of this length by the draft model."""
    return 0.0 if drafter.model_pace is None else drafter.model_pace.expects(drafted)

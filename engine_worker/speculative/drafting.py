"""Decides which sequences of a step have drafts, and how many tokens."""

from collections import abc
from collections.abc import Callable
from typing import NamedTuple

from engine_worker.request import Sequence
from engine_worker.scheduling.simple import Schedule
from engine_worker.speculative.cost import Cost, Gain
from engine_worker.speculative.draft_model import ModelDrafting, room_of
from engine_worker.speculative.drafter import Drafter, begin_lookup
from engine_worker.speculative.lookup import LookupSchedule

Drafts = dict[Sequence, abc.Sequence[int]]


class DraftCounts(NamedTuple):
    """Sequences with drafts in a step, and their draft tokens."""

    sequences: int = 0
    drafted: int = 0
    accepted: int = 0


NO_DRAFTS = DraftCounts()


class Drafting:
    """Drafts use the part of a step's token budget that context leaves, and the room in the blocks of their sequences:
    no block is allocated for them."""

    def __init__(
        self,
        max_tokens_per_step: int,
        max_batch_size: int,
        clock: Callable[[], float],
        model: ModelDrafting | None = None,
    ) -> None:
        """`max_batch_size`: steps with more sequences have no drafts, which would slow down all of them. `model`: used
        instead of lookups where it pays."""
        self._clock = clock
        self._max_tokens_per_step = max_tokens_per_step
        self._max_batch_size = max_batch_size
        self.model = model
        self.gain = Gain()
        """Gain of drafts by lookup or from the caller."""
        self._searches = LookupSchedule()
        self._counts = NO_DRAFTS

    def may_draft(self, in_flight: Schedule) -> bool:
        """Whether any sequence of the in-flight step may have drafts once its newest token is known."""
        sequences = [*in_flight.generation, *(sequence for sequence, _ in in_flight.context)]
        if len(sequences) > self._max_batch_size:
            return False
        model = self.model
        if self._searches.due:
            cost = self.gain.cost.of(len(sequences))
            if any(_may_draft(sequence, cost) for sequence in sequences):
                return True
        if model is None:
            return False
        return any(
            sequence.request.max_drafts > 0 and model.may_draft(sequence, len(sequences)) for sequence in sequences
        )

    def may_use_model(self, schedule: Schedule) -> bool:
        """Whether the draft model may compute before this step does."""
        small = len(schedule.generation) + len(schedule.context) <= self._max_batch_size
        return self.model is not None and small and bool(schedule.drafting)

    def propose(self, schedule: Schedule, *, idle: bool = True) -> Drafts:
        """The drafts of a step. `idle`: no step is in flight; otherwise the draft model, which would have to wait for
        it, is not used."""
        batch_size = len(schedule.generation) + len(schedule.context)
        if batch_size > self._max_batch_size:
            return {}
        eligible = schedule.drafting
        if not eligible:
            return {}
        budget = self._max_tokens_per_step - len(schedule.generation) - sum(size for _, size in schedule.context)
        if self.model is None:
            return self._propose(eligible, batch_size, budget)
        drafters = {sequence: self._drafter(sequence) for sequence in eligible}
        by_model = self.model.propose(drafters, batch_size, budget, idle=idle)
        rest = [sequence for sequence in eligible if sequence not in by_model]
        return by_model | self._propose(rest, batch_size, budget - sum(map(len, by_model.values())))

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record the result of a sequence's draft, after its step was committed."""
        counts, drafter = self._counts, self._drafter(sequence)
        self._counts = DraftCounts(counts.sequences + 1, counts.drafted + drafted, counts.accepted + accepted)
        drafter.record(drafted, accepted)
        if self.model is not None and drafter.by_model:
            self.model.record(sequence, accepted)
        else:
            self.gain.record(accepted)

    def end_step(self, schedule: Schedule, drafted: int, seconds: float) -> DraftCounts:
        """Record the duration of a step that may have had drafts; returns their counts. `drafted`: its draft
        tokens."""
        batch_size = len(schedule.generation)
        # Costs are learned only in steps that may have drafts, so that other steps do not pay for the bookkeeping.
        if batch_size <= self._max_batch_size and not schedule.context and schedule.drafting:
            if self.model is None or not self.model.used:
                gained = self.gain.of(self.gain.cost.of(batch_size), drafted) if drafted else 0.0
                self._searches.record(gained, batch_size / seconds if seconds else 0.0)
                self.gain.cost.record(batch_size, drafted, seconds)
            if self.model is not None:
                self.model.record_time(batch_size, drafted, seconds)
        counts, self._counts = self._counts, NO_DRAFTS
        self.gain.end_step(drafted)
        if self.model is not None:
            self.model.gain.end_step(drafted)
        return counts

    def _propose(self, eligible: list[Sequence], batch_size: int, budget: int) -> Drafts:
        """Drafts by lookup or from the caller."""
        if not self._searches.due:
            self._searches.skip()
            return {}
        cost = self.gain.cost.of(batch_size)
        if cost is None:
            return {}
        # Before the time is taken: creating a drafter reads the whole prompt.
        drafters = list(map(self._drafter, eligible))
        start = self._clock()
        drafts: Drafts = {}
        expected = 0.0
        for sequence, drafter in zip(eligible, drafters, strict=True):
            tokens = drafter.propose(sequence.output, min(budget, room_of(sequence)), cost.token)
            if tokens:
                drafts[sequence] = tokens
                budget -= len(tokens)
                expected += drafter.expects(len(tokens))
        self._searches.add(self._clock() - start)
        if not self.gain.pays(cost, expected, sum(map(len, drafts.values()))):
            return {}
        self.gain.expect(expected)
        return drafts

    def _drafter(self, sequence: Sequence) -> Drafter:
        """The sequence's drafter. Created for its first generation step, because many requests end before."""
        if sequence.drafter is None:
            request = sequence.request
            expected = request.extras.speculation.draft_token_ids
            has_model = self.model is not None and request.virtual is None
            if request.lookup is None:
                prompt, virtual = request.submit.prompt, request.virtual
                # Without virtual tokens, which cannot be sampled.
                request.lookup = begin_lookup(prompt if virtual is None else virtual.without(prompt), expected)
            sequence.drafter = Drafter(request.lookup, request.max_drafts, expected, has_model=has_model)
        return sequence.drafter


def _may_draft(sequence: Sequence, cost: Cost | None) -> bool:
    if cost is None or not sequence.request.max_drafts:
        return False
    return sequence.drafter is None or sequence.drafter.pays(cost.token)

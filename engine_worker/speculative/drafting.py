"""Which sequences of a step get drafts, and how many."""

from collections import abc
from collections.abc import Callable
from typing import NamedTuple

from engine_worker.scheduling.simple import Schedule
from engine_worker.sequence import Sequence
from engine_worker.speculative.cost import Cost
from engine_worker.speculative.drafter import Drafter, begin_lookup
from engine_worker.speculative.gain import Gain
from engine_worker.speculative.model_drafting import ModelDrafting, room_of
from engine_worker.speculative.searches import Searches

Drafts = dict[Sequence, abc.Sequence[int]]


class DraftCounts(NamedTuple):
    sequences: int = 0
    drafted: int = 0
    accepted: int = 0


NO_DRAFTS = DraftCounts()


class Drafting:
    """Drafts take what the context leaves of a step's tokens, and the room that sequences have in their blocks: nothing
    is allocated for guesses."""

    def __init__(
        self,
        max_tokens_per_step: int,
        max_batch_size: int,
        clock: Callable[[], float],
        model: ModelDrafting | None = None,
    ) -> None:
        """`max_batch_size`: steps of more sequences have no drafts, which would slow down all of them. `model`: guesses
        before lookups do."""
        self._clock = clock
        self._max_tokens_per_step = max_tokens_per_step
        self._max_batch_size = max_batch_size
        self.model = model
        self.gain = Gain()
        """Of drafts that take no time to find."""
        self._searches = Searches()
        self._counts = NO_DRAFTS

    def wants(self, in_flight: Schedule) -> bool:
        """Whether one of these sequences may get drafts once its newest token is known."""
        sequences = [*in_flight.generation, *(sequence for sequence, _ in in_flight.context)]
        if len(sequences) > self._max_batch_size:
            return False
        model = self.model
        if self._searches.due:
            cost = self.gain.cost.of(len(sequences))
            if any(_may_draft(sequence, cost) for sequence in sequences):
                return True
        return model is not None and any(_asks(each) and model.wants(each, len(sequences)) for each in sequences)

    def asks_model(self, schedule: Schedule) -> bool:
        """Whether the draft model may compute before this step does."""
        small = len(schedule.generation) + len(schedule.context) <= self._max_batch_size
        return self.model is not None and small and bool(_asking(schedule))

    def propose(self, schedule: Schedule, *, idle: bool = True) -> Drafts:
        """`idle`: no step is in flight. The draft model would wait for one that is, so it is not asked."""
        batch_size = len(schedule.generation) + len(schedule.context)
        if batch_size > self._max_batch_size:
            return {}
        asking = _asking(schedule)
        if not asking:
            return {}
        budget = self._max_tokens_per_step - len(schedule.generation) - sum(size for _, size in schedule.context)
        if self.model is None:
            return self._propose(asking, batch_size, budget)
        guessed = self.model.propose({each: self._drafter(each) for each in asking}, batch_size, budget, idle=idle)
        others = [sequence for sequence in asking if sequence not in guessed]
        return guessed | self._propose(others, batch_size, budget - sum(map(len, guessed.values())))

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The draws behind its drafts were committed."""
        counts, drafter = self._counts, self._drafter(sequence)
        self._counts = DraftCounts(counts.sequences + 1, counts.drafted + drafted, counts.accepted + accepted)
        drafter.record(drafted, accepted)
        if self.model is not None and drafter.by_model:
            self.model.record(sequence, accepted)
        else:
            self.gain.record(accepted)

    def end_step(self, schedule: Schedule, drafted: int, seconds: float) -> DraftCounts:
        """What was recorded since the step before. `drafted`: tokens of this one, which took so long."""
        batch_size = len(schedule.generation)
        # What drafts cost is learned where some may come, so that other steps do not pay for it.
        if batch_size <= self._max_batch_size and not schedule.context and _asking(schedule):
            if self.model is None or not self.model.asked:
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

    def _propose(self, asking: list[Sequence], batch_size: int, budget: int) -> Drafts:
        """What callers expect, and what is looked up."""
        if not self._searches.due:
            self._searches.skip()
            return {}
        cost = self.gain.cost.of(batch_size)
        if cost is None:
            return {}
        # Before the clock starts: the first search of a sequence reads its prompt.
        drafters = list(map(self._drafter, asking))
        start = self._clock()
        found: Drafts = {}
        expected = 0.0
        for sequence, drafter in zip(asking, drafters, strict=True):
            drafts = drafter.propose(sequence.output, min(budget, room_of(sequence)), cost.token)
            if drafts:
                found[sequence] = drafts
                budget -= len(drafts)
                expected += drafter.expects(len(drafts))
        self._searches.add(self._clock() - start)
        if not self.gain.pays(cost, expected, sum(map(len, found.values()))):
            return {}
        self.gain.expect(expected)
        return found

    def _drafter(self, sequence: Sequence) -> Drafter:
        """Made for the first step that generates: many requests end before."""
        if sequence.drafter is None:
            request = sequence.request
            expected = request.spec.speculation.draft_token_ids
            has_model = self.model is not None and request.virtual is None
            if request.lookup is None:
                prompt, virtual = request.spec.prompt, request.virtual
                # Guesses are tokens that can be drawn.
                request.lookup = begin_lookup(prompt if virtual is None else virtual.without(prompt), expected)
            sequence.drafter = Drafter(request.lookup, request.max_drafts, expected, has_model=has_model)
        return sequence.drafter


def _asking(schedule: Schedule) -> list[Sequence]:
    # In every step: without a call per sequence.
    return [sequence for sequence in schedule.generation if sequence.request.max_drafts]


def _asks(sequence: Sequence) -> bool:
    return sequence.request.max_drafts > 0


def _may_draft(sequence: Sequence, cost: Cost | None) -> bool:
    if cost is None or not _asks(sequence):
        return False
    return sequence.drafter is None or sequence.drafter.pays(cost.token)
